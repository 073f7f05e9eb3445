"""One number of each rank, summed up over the ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MinMeanMax:
    """Spread of a number over the ranks that have it; NaN on any of them makes all three NaN."""

    min: float
    mean: float
    max: float
    max_rank: int
    """Rank with the largest value (the lowest such rank), or with the first NaN: the one that the others wait for."""
    num_ranks: int
    """Ranks that have the number."""

    @classmethod
    def of(cls, by_rank: Mapping[int, float]) -> "MinMeanMax":
        """Spread of at least one value, by rank."""
        lost = [rank for rank, value in by_rank.items() if math.isnan(value)]
        if lost:
            return cls(math.nan, math.nan, math.nan, lost[0], len(by_rank))
        top = max(by_rank.values())
        return cls(
            min=min(by_rank.values()),
            mean=sum(by_rank.values()) / len(by_rank),
            max=top,
            max_rank=min(rank for rank, value in by_rank.items() if value == top),
            num_ranks=len(by_rank),
        )
