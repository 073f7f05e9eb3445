"""A small module with faults, for patches to mend."""

import math

OFFSET = 10


def area(radius: float) -> float:
    return math.pi * radius


def shifted(x: int) -> int:
    return x + OFFSET


class Counter:
    def count(self) -> int:
        return 1

    @classmethod
    def start(cls) -> int:
        return OFFSET
