"""The numbers of a window of time, of one engine or of several together. Knows no engine and no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAN = math.nan
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
    """Prompt tokens computed (not found in the cache) in the window, by the time in which any row was between its begin
    and its first token; of rows that have ended; of several engines, their sum."""
    decode_tokens_per_s: float
    """Response tokens after the first made in the window, by the time in which any row was between its first token and
    its end; of rows that have ended; of several engines, their sum."""
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
    """Of those, and of `response_tokens`, all that the rows have which ended in the window."""
    response_tokens: int
    prefill_tokens: float
    """Computed in the window, of rows whose first token's time is known. Tokens of a row that was at it before count by
    the share of its time, for nobody tells of each."""
    decode_tokens: float
    """After the first, made in the window, of the same rows in the same way."""
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


def _rate(parts: Sequence[tuple[float, float]]) -> float:
    """Sum of the rates of engines that have one."""
    known = [tokens / seconds for tokens, seconds in parts if seconds > 0]
    return sum(known) if known else NAN


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else NAN
