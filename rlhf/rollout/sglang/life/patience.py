"""How long something has been waited for, by one who looks again and again."""

import time
from collections.abc import Callable

LONGEST_GAP_S = 2.0
"""A longer time between two looks counts as so much: whoever waits was held up too, and maybe all that it waits for (a
job that was suspended, a laptop that was shut)."""


class Patience:
    """A wait that may last so long, added up look by look. Made, or begun anew, when the wait begins."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self.was_held_up = False
        """Before the last look."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """From now on."""
        self.waited_s, self._looked = 0.0, self._clock()

    def is_over(self) -> bool:
        """A look, one of several a second: whether that was longer than the limit."""
        now = self._clock()
        self.was_held_up = now - self._looked > LONGEST_GAP_S
        self.waited_s += min(now - self._looked, LONGEST_GAP_S)
        self._looked = now
        return self.waited_s > self.limit_s
