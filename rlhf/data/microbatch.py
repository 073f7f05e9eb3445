"""Rows of one rank cut into microbatches, the same number on every rank of a group.

Knows lengths and a budget of tokens, nothing of models or batches.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.errors import ConfigError, ShapeError

Plan = tuple[tuple[int, ...], ...]
"""Row indices of each microbatch, ascending; an empty microbatch is a dummy that counts nothing."""


def plan_microbatches(
    lengths: Sequence[int], token_budget: int, group: ProcessGroup | None, multiple_of: int = 1
) -> Plan:
    """Cut rows into microbatches of at most token_budget tokens, as even as can be had.

    Collective over `group` (gloo; None when this rank is alone): the number of microbatches is the largest that any
    rank needs, rounded up to `multiple_of`, so that Megatron's schedules agree. A rank that needs fewer spreads its
    rows over all of them as far as they go; with fewer rows than microbatches the rest are empty tuples. A row longer
    than the budget is alone in its microbatch. Depends on the arguments only: ranks that hold the same rows get the
    same plan.

    Raises:
        ConfigError: The budget or multiple_of is below 1.
        ShapeError: A row has no token.
    """
    if token_budget < 1 or multiple_of < 1:
        raise ConfigError(
            f"plan_microbatches: token_budget {token_budget}, multiple_of {multiple_of}; needs both at least 1; "
            "raise microbatch_tokens"
        )
    if min(lengths, default=1) < 1:
        raise ShapeError(f"plan_microbatches: row {list(lengths).index(min(lengths))} has no token; drop it before")
    tight = _fit(lengths, token_budget)
    count = _largest(max(1, len(tight)), group)
    count = -(-count // multiple_of) * multiple_of
    even = _spread(lengths, count)
    fits = all(len(rows) <= 1 or sum(lengths[r] for r in rows) <= token_budget for rows in even)
    plan = even if fits else tight + [[] for _ in range(count - len(tight))]
    return tuple(tuple(sorted(rows)) for rows in plan)


def _largest(count: int, group: ProcessGroup | None) -> int:
    if group is None or group.size() == 1:
        return count
    agreed = torch.tensor([count])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return int(agreed)


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Few microbatches: best fit, longest first (at most 11/9 of the fewest possible, plus one)."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, bin), ascending
    for row in _descending(lengths):
        at = bisect_left(room, (lengths[row], -1))
        if at == len(room):
            free, index = budget, len(bins)
            bins.append([])
        else:
            free, index = room.pop(at)
        bins[index].append(row)
        insort(room, (max(0, free - lengths[row]), index))
    return bins


def _spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Even microbatches: longest first, each to the one that holds least so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in _descending(lengths):
        held, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (held + lengths[row], index))
    return bins
