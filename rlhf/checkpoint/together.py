"""The few collectives of this package: over a gloo group, or in a process alone (group None)."""

from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.dist import agree

T = TypeVar("T")


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """(number of this rank within the group, number of its ranks); the first rank leads."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gathered(value: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's value, on all of them: small ones only."""
    return [value] if group is None else agree.gather(value, group)


def from_first(value: T, group: ProcessGroup | None) -> T:
    """The first rank's value."""
    return value if group is None else agree.from_first(value, group)


def to_first(value: T, group: ProcessGroup | None) -> list[T]:
    """Every rank's value, on the first rank; [] on the others."""
    if group is None:
        return [value]
    number, count = place(group)
    found: list[T | None] | None = [None] * count if number == 0 else None
    dist.gather_object(value, found, dst=dist.get_process_group_ranks(group)[0], group=group)
    return found or []  # type: ignore[return-value]  # every place has been filled
