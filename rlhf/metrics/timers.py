"""Where the time goes: named phases and, in steps that are recorded, finer spans on one rank, by the monotonic clock.

Phases become numbers of the step; spans only become intervals of a timeline. The clock is the machine's, so intervals
of ranks on one node can be compared. Knows no other rank: reduce.py does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Kind(StrEnum):
    """What an interval is."""

    PHASE = "phase"
    """A part of the step that the metrics count."""
    WORK = "work"
    """Something this rank does."""
    WAIT = "wait"
    """Waiting for other ranks, their bytes' way included."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One pass through a phase or a span."""

    name: str
    start: float
    """Seconds of the clock."""
    stop: float
    """Seconds of the clock."""
    kind: Kind = Kind.PHASE
    depth: int = 0
    """Phases and spans that were open around it."""


class SpanFn(Protocol):
    """Names a block inside a phase, for timelines."""

    def __call__(self, name: str, kind: Kind = Kind.WORK) -> AbstractContextManager[None]:
        """The block is what is done inside the context."""


def no_span(name: str, kind: Kind = Kind.WORK) -> AbstractContextManager[None]:
    """A `SpanFn` that records nothing."""
    del name, kind
    return nullcontext()


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
        self.clock = clock
        self._on_enter = on_enter
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._recorded: list[Interval] | None = None
        self._depth = 0

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
        self._depth += 1
        start = self.clock()
        try:
            yield
        finally:
            stop = self.clock()
            self._depth -= 1
            self._keep(Interval(name, start, stop, Kind.PHASE, self._depth))
            if name not in self._open[:-1]:  # a phase inside itself counts once
                self._seconds[name] = self._seconds.get(name, 0.0) + stop - start
            self._open.pop()
            self._tell()

    def span(self, name: str, kind: Kind = Kind.WORK) -> AbstractContextManager[None]:
        """A `SpanFn`; outside `recording` it does nothing."""
        return nullcontext() if self._recorded is None else self._span(name, kind)

    @contextmanager
    def recording(self) -> Iterator[list[Interval]]:
        """Keep every phase and span that ends inside; the list given fills in the order of their ends."""
        assert self._recorded is None, "a recording inside a recording"
        assert self._depth == 0, f"a recording inside {self.current}"
        kept = self._recorded = []
        try:
            yield kept
        finally:
            self._recorded = None

    def drain(self) -> dict[str, float]:
        """Seconds of each phase that ended since the last drain, in order of first end; open phases count later."""
        drained, self._seconds = self._seconds, {}
        return drained

    @contextmanager
    def _span(self, name: str, kind: Kind) -> Iterator[None]:
        self._depth += 1
        start = self.clock()
        try:
            yield
        finally:
            stop = self.clock()
            self._depth -= 1
            self._keep(Interval(name, start, stop, kind, self._depth))

    def _keep(self, interval: Interval) -> None:
        if self._recorded is not None:
            self._recorded.append(interval)

    def _tell(self) -> None:
        if self._on_enter is not None:
            self._on_enter(self.current)
