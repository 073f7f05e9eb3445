"""A curve in one line of text."""

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as blocks from the least (lowest) to the greatest; more than `width` are averaged in groups.

    A value that is not finite leaves a gap; equal values are drawn at middle height.
    """
    if len(values) > width:
        cuts = [i * len(values) // width for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(cuts)]
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        at = (value - low) / (high - low) if high > low else 0.5
        return BLOCKS[min(int(at * len(BLOCKS)), len(BLOCKS) - 1)]

    return "".join(map(block, values))


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan
