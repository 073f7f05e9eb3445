"""Where the time goes: named phases on one rank, by the monotonic clock.

The clock is the machine's, so intervals of ranks on one node can be compared. Knows no other rank: reduce.py does.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KEPT_INTERVALS = 4096  # the latest ones; a step has tens


@dataclass(frozen=True, slots=True)
class Interval:
    """One pass through a phase."""

    phase: str
    start: float
    """Seconds of the monotonic clock."""
    stop: float
    """Seconds of the monotonic clock."""

    def overlap_s(self, other: "Interval") -> float:
        """Seconds during which both ran."""
        return max(0.0, min(self.stop, other.stop) - max(self.start, other.start))


class Timers:
    """Phases of one rank.

    A phase is named by its full path, `rollout/generate`; the time of a phase opened inside another counts in both.
    Used from one thread; `current` may be read from any.

    Args:
        on_enter: Called with a phase's name when it begins, and with the name of the phase around it when it ends
            (empty outside all phases), so that a display knows what the rank is doing.
        clock: Seconds, never falling.
    """

    def __init__(
        self, *, on_enter: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.intervals: deque[Interval] = deque(maxlen=KEPT_INTERVALS)
        self._on_enter = on_enter
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """Innermost open phase; empty outside all phases."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises."""
        assert name.strip("/") == name != "", f"phase name {name!r}"
        self._open.append(name)
        self._tell()
        start = self._clock()
        try:
            yield
        finally:
            interval = Interval(name, start, self._clock())
            self.intervals.append(interval)
            if name not in self._open[:-1]:  # a phase inside itself counts once
                self._seconds[name] = self._seconds.get(name, 0.0) + interval.stop - interval.start
            self._open.pop()
            self._tell()

    def drain(self) -> dict[str, float]:
        """Seconds of each phase that ended since the last drain, in order of first end; open phases count later."""
        drained, self._seconds = self._seconds, {}
        return drained

    def _tell(self) -> None:
        if self._on_enter is not None:
            self._on_enter(self.current)
