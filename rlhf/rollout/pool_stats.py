"""How the rows of a call were spread over engines, and what that cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf.rollout.pool_feed import PoolFeed


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Of one engine, in one call; small enough to be gathered."""

    queue_s: NDArray[np.float32]
    """For each row taken: seconds from the call until an engine took it."""
    busy_s: float
    """Seconds in which its engine had rows."""
    tokens: int
    """Of its responses, what they were begun with included."""
    moved: int
    """Groups that had been planned for other engines."""
    slot_tokens: int
    """See PoolFeed.slot_tokens."""
    wasted_tokens: int
    """Of these, what no row had."""

    @staticmethod
    def of(feed: PoolFeed) -> "PoolPart":
        """Once the engine has ended."""
        slots, used = feed.slot_tokens()
        return PoolPart(
            queue_s=np.array(feed.queue_s, dtype=np.float32),
            busy_s=feed.busy_s,
            tokens=feed.num_tokens,
            moved=feed.claims.from_others,
            slot_tokens=slots,
            wasted_tokens=slots - used,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """Of all engines of one call."""

    engines: int
    """Engines that took part."""
    lost_engines: int
    """Of these, lost on the way."""
    rows: int
    """Rows that an engine took; those of a lost one count again."""
    mean_response_tokens: float
    """0 where there is no response."""
    queue_time_p50_s: float
    """Half of the rows were taken by an engine within so many seconds of the call; 0 without rows."""
    queue_time_p95_s: float
    """95 % of them were."""
    busy_spread: float
    """Longest time that an engine had rows, by the mean over those that took part; 1 without rows."""
    moved: int
    """Groups answered by another engine than planned."""
    padding_waste: float
    """Share of tokens of slots that no row had; 0 in dynamic batching, where rows come and go."""

    @staticmethod
    def of(parts: Sequence[PoolPart], *, engines: int, lost_engines: int) -> "PoolStats":
        """From the parts of all engines."""
        waits = np.concatenate([part.queue_s for part in parts])
        busy, slots = [part.busy_s for part in parts], sum(part.slot_tokens for part in parts)
        rows = len(waits)
        return PoolStats(
            engines=engines,
            lost_engines=lost_engines,
            rows=rows,
            mean_response_tokens=sum(part.tokens for part in parts) / rows if rows else 0.0,
            queue_time_p50_s=float(np.quantile(waits, 0.5)) if rows else 0.0,
            queue_time_p95_s=float(np.quantile(waits, 0.95)) if rows else 0.0,
            busy_spread=max(busy) * engines / sum(busy) if sum(busy) > 0 else 1.0,
            moved=sum(part.moved for part in parts),
            padding_waste=sum(part.wasted_tokens for part in parts) / slots if slots else 0.0,
        )
