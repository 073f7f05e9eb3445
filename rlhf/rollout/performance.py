"""How an engine did over a window of time: latencies, rates, queue, use of its prefix cache. Knows no engine.

Engines tell a monitor when each row was handed in, began, had its first token and ended: a few calls a row, none a
token. All numbers follow from these times when they are asked for. Windows of several engines add up to one.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAN = math.nan
KEPT_ROWS = 200_000
"""Of a window with more, the rows that ended last are kept, in some 50 MB."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceStats:
    """Numbers of one window, of one engine or of several together. NaN: nothing to take it from."""

    rows: int
    """Responses that ended in the window."""
    seconds: float
    """Length of the window; of several engines, the longest."""
    latency_p50_s: float
    """Median time from handing a row in to its end."""
    latency_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    first_token_p50_s: float
    """Median time from handing a row in to its first token."""
    first_token_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    queue_p50_s: float
    """Median time from handing a row in until the engine began with it."""
    queue_p95_s: float
    """The same, which 95 % of the rows do not exceed."""
    queue_mean: float
    """Rows waiting, mean over the window; of several engines, their sum."""
    queue_max: int
    """Most rows waiting at a time at one engine."""
    prefill_tokens_per_s: float
    """Prompt tokens computed (not found in the cache), by the time in which any row was between its begin and its first
    token; of several engines, their sum."""
    decode_tokens_per_s: float
    """Response tokens after the first, by the time in which any row was between its first token and its end; of several
    engines, their sum."""
    utilisation: float
    """Share of the window in which the engine had a row to work on; of several engines, the mean."""
    busy_spread: float
    """Longest time that an engine was busy by the mean over the engines; 1 for one engine, or when all are alike."""
    running_mean: float
    """Rows worked on at a time, mean over the time that the engine was busy; of several engines, the mean."""
    cache_hits: float
    """Share of prompt tokens that were found in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceWindow:
    """One engine's window: what is needed to tell its numbers, and to add it to others. Picklable, 24 bytes a row."""

    seconds: float
    latency_s: Floats
    """[rows], from handing in to the end."""
    first_token_s: Floats
    """[rows] to the first token, NaN where that is not known."""
    queue_s: Floats
    """[rows] to the begin."""
    prompt_tokens: int
    cached_tokens: int
    response_tokens: int
    prefill_tokens: int
    """Computed, of rows whose first token's time is known."""
    decode_tokens: int
    """After the first, of the same rows."""
    prefill_s: float
    """Time in which any row was between begin and first token."""
    decode_s: float
    """Time in which any row was between first token and end."""
    busy_s: float
    """Time in which any row was between begin and end."""
    running_s: float
    """Sum over rows of the time between begin and end."""
    waiting_s: float
    """Sum over rows of the time between handing in and begin."""
    most_waiting: int

    @property
    def stats(self) -> PerformanceStats:
        """The numbers of this engine alone."""
        return combined([self])


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
        """Open a new window: rows that have ended are forgotten, those under way count in the window they end in."""
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
            prefill_tokens=sum(one.prompt_tokens - one.cached_tokens for one in timed),
            decode_tokens=sum(max(0, one.response_tokens - 1) for one in timed),
            prefill_s=_union(self._inside(begun[known], first_token[known], end)),
            decode_s=_union(self._inside(first_token[known], ended[known], end)),
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


def combined(windows: Sequence[PerformanceWindow]) -> PerformanceStats:
    """The numbers of several engines that worked side by side: latencies over all rows, rates and queues added up."""
    assert windows, "no engine, no numbers"
    latency, first_token, queue = (
        np.concatenate([getattr(one, name) for one in windows]) for name in ("latency_s", "first_token_s", "queue_s")
    )
    first_token = first_token[~np.isnan(first_token)]
    busy = [one.busy_s for one in windows]
    return PerformanceStats(
        rows=len(latency),
        seconds=max(one.seconds for one in windows),
        latency_p50_s=_quantile(latency, 0.5),
        latency_p95_s=_quantile(latency, 0.95),
        first_token_p50_s=_quantile(first_token, 0.5),
        first_token_p95_s=_quantile(first_token, 0.95),
        queue_p50_s=_quantile(queue, 0.5),
        queue_p95_s=_quantile(queue, 0.95),
        queue_mean=sum(_by(one.waiting_s, one.seconds, 0.0) for one in windows),
        queue_max=max(one.most_waiting for one in windows),
        prefill_tokens_per_s=_rate([(one.prefill_tokens, one.prefill_s) for one in windows]),
        decode_tokens_per_s=_rate([(one.decode_tokens, one.decode_s) for one in windows]),
        utilisation=sum(_by(one.busy_s, one.seconds, 0.0) for one in windows) / len(windows),
        busy_spread=_by(max(busy), sum(busy) / len(busy), 1.0),
        running_mean=sum(_by(one.running_s, one.busy_s, 0.0) for one in windows) / len(windows),
        cache_hits=_by(sum(one.cached_tokens for one in windows), sum(one.prompt_tokens for one in windows), NAN),
    )


def _by(part: float, whole: float, otherwise: float) -> float:
    return part / whole if whole > 0 else otherwise


def _rate(parts: Sequence[tuple[int, float]]) -> float:
    """Sum of the rates of engines that have one."""
    known = [tokens / seconds for tokens, seconds in parts if seconds > 0]
    return sum(known) if known else NAN


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else NAN


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
