"""When an engine's rows were handed in, began and ended; what became of them in a window of time. Knows no engine.

Engines tell a monitor when each row was handed in, began, had its first token and ended: a few calls a row, none a
token. All numbers follow from these times when they are asked for (`performance_window.py`).
"""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rlhf.rollout.performance_window import NAN, Floats, PerformanceStats, PerformanceWindow

KEPT_ROWS = 200_000
"""Of a window with more, the rows that ended last are kept, in some 50 MB."""


@dataclass(slots=True)
class _Row:
    submitted: float
    begun: float = NAN
    first_token: float = NAN


@dataclass(frozen=True, slots=True)
class _Ended:
    submitted: float
    begun: float
    first_token: float
    ended: float
    prompt_tokens: int
    cached_tokens: int
    response_tokens: int


class PerformanceMonitor:
    """On an engine's leader rank. Local; costs microseconds a row.

    A row is known by any name that no other row under way has. What is told twice counts the first time, so that a
    pool may hand a row in before its engine does. Times are of `clock`, which engines may read elsewhere
    (CLOCK_MONOTONIC is one for all processes of a host) and give as `at`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """A window is open from the start."""
        self._clock = clock
        self._under_way: dict[Hashable, _Row] = {}
        self._ended: deque[_Ended] = deque(maxlen=KEPT_ROWS)
        self._from, self._to = clock(), NAN

    def start(self) -> None:
        """Open a new window: rows that have ended are forgotten, those under way count in the window they end in.

        Their latencies are whole; of their tokens those that come from now on count.
        """
        self._ended.clear()
        self._from, self._to = self._clock(), NAN

    def stop(self) -> None:
        """Close the window: time that passes until the next `start` does not count."""
        self._to = self._clock()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """A window from here to there."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def submitted(self, rows: Iterable[Hashable], *, at: float | None = None) -> None:
        """Rows were handed in."""
        now = self._clock() if at is None else at
        for row in rows:
            self._under_way.setdefault(row, _Row(now))

    def begun(self, rows: Iterable[Hashable], *, at: float | None = None) -> None:
        """The engine began to work on rows; rows that nobody handed in were handed in now."""
        now = self._clock() if at is None else at
        for row in rows:
            one = self._under_way.setdefault(row, _Row(now))
            one.begun = now if math.isnan(one.begun) else one.begun

    def first_token(self, rows: Iterable[Hashable], *, at: float | None = None) -> None:
        """Rows have their first token."""
        now = self._clock() if at is None else at
        for row in rows:
            one = self._under_way.setdefault(row, _Row(now))
            one.first_token = now if math.isnan(one.first_token) else one.first_token

    def ended(
        self,
        row: Hashable,
        *,
        prompt_tokens: int,
        response_tokens: int,
        cached_tokens: int = 0,
        at: float | None = None,
    ) -> None:
        """A row has ended, by a token, its length or an abort.

        Args:
            row: Its name, which is free again.
            prompt_tokens: Of its prompt (and what it was continued from).
            response_tokens: Sampled by this engine.
            cached_tokens: Those of the prompt that were not computed for this row.
            at: When; now if not given.
        """
        now = self._clock() if at is None else at
        one = self._under_way.pop(row, None) or _Row(now)
        begun = now if math.isnan(one.begun) else one.begun
        self._ended.append(
            _Ended(one.submitted, begun, one.first_token, now, prompt_tokens, cached_tokens, response_tokens)
        )

    def forget(self, rows: Iterable[Hashable]) -> None:
        """Rows that this engine will not end: another one answers them."""
        for row in rows:
            self._under_way.pop(row, None)

    @property
    def waiting(self) -> int:
        """Rows handed in that the engine has not begun with."""
        return sum(math.isnan(row.begun) for row in self._under_way.values())

    @property
    def running(self) -> int:
        """Rows that the engine is at work on."""
        return len(self._under_way) - self.waiting

    def window(self) -> PerformanceWindow:
        """What the open window has seen so far, or the closed one saw."""
        end = self._clock() if math.isnan(self._to) else self._to
        times = np.array(
            [(one.submitted, one.begun, one.first_token, one.ended) for one in self._ended], dtype=np.float64
        ).reshape(-1, 4)
        still = np.array([(r.submitted, r.begun) for r in self._under_way.values()], dtype=np.float64).reshape(-1, 2)
        submitted, begun, first_token, ended = times.T
        timed = [one for one in self._ended if not math.isnan(one.first_token)]
        begin = np.concatenate([begun, np.where(np.isnan(still[:, 1]), end, still[:, 1])])
        handed_in = np.concatenate([submitted, still[:, 0]])
        last = np.concatenate([ended, np.full(len(still), end)])
        known = ~np.isnan(first_token)
        prefills, decodes = (begun[known], first_token[known]), (first_token[known], ended[known])
        waits = self._inside(handed_in, begin, end)
        works = self._inside(begin, last, end)
        return PerformanceWindow(
            seconds=end - self._from,
            latency_s=ended - submitted,
            first_token_s=first_token - submitted,
            queue_s=begun - submitted,
            prompt_tokens=sum(one.prompt_tokens for one in self._ended),
            cached_tokens=sum(one.cached_tokens for one in self._ended),
            response_tokens=sum(one.response_tokens for one in self._ended),
            prefill_tokens=self._made([one.prompt_tokens - one.cached_tokens for one in timed], prefills, end),
            decode_tokens=self._made([max(0, one.response_tokens - 1) for one in timed], decodes, end),
            prefill_s=_union(self._inside(*prefills, end)),
            decode_s=_union(self._inside(*decodes, end)),
            busy_s=_union(works),
            running_s=float((works[1] - works[0]).sum()),
            waiting_s=float((waits[1] - waits[0]).sum()),
            most_waiting=_most_at_once(waits),
        )

    def stats(self) -> PerformanceStats:
        """The numbers of the window."""
        return self.window().stats

    def _inside(self, starts: Floats, stops: Floats, end: float) -> tuple[Floats, Floats]:
        """What of some spans lies in the window; spans outside are empty."""
        clipped = np.clip(starts, self._from, end)
        return clipped, np.maximum(clipped, np.clip(stops, self._from, end))

    def _made(self, tokens: Sequence[int], spans: tuple[Floats, Floats], end: float) -> float:
        """How many of the tokens that were made evenly over each span came in the window; those of a moment at once."""
        starts, stops = spans
        inside, whole = self._inside(starts, stops, end), stops - starts
        at_once = (self._from <= starts) & (starts <= end)
        share = np.where(whole > 0, (inside[1] - inside[0]) / np.where(whole > 0, whole, 1.0), at_once)
        return float((np.array(tokens, dtype=np.float64) * share).sum())


def _union(spans: tuple[Floats, Floats]) -> float:
    """Time that lies in at least one of the spans."""
    starts, stops = spans
    if not len(starts):
        return 0.0
    order = np.argsort(starts)
    starts, reached = starts[order], np.maximum.accumulate(stops[order])
    gaps = np.maximum(0.0, starts[1:] - reached[:-1])
    return float(reached[-1] - starts[0] - gaps.sum())


def _most_at_once(spans: tuple[Floats, Floats]) -> int:
    """The most spans that overlap at a time; where one ends another may begin."""
    starts, stops = spans
    some = stops > starts
    times = np.concatenate([stops[some], starts[some]])
    steps = np.concatenate([np.full(some.sum(), -1), np.full(some.sum(), 1)])
    order = np.lexsort((steps, times))
    return int(steps[order].cumsum().max(initial=0))
