"""Values that the ranks of one group settle together, on a gloo group of just those ranks.

Control flow may depend only on such values. Every function is collective over `group`: all its ranks must call it, in
the same order. Nothing here takes the whole world by default, for that would be a barrier.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from rlhf.errors import AgreementError, RlhfError

T = TypeVar("T")


def gather(value: T, group: ProcessGroup) -> list[T]:
    """Every rank's value, in the order of the group's ranks. The values are pickled: small ones only."""
    found: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found  # type: ignore[return-value]  # every place has been filled


def agree(value: T, group: ProcessGroup, *, what: str = "value") -> T:
    """The value, once it is known that all ranks of the group hold an equal one.

    Raises:
        AgreementError: They do not; the message names the ranks (of the job) with each of the values.
    """
    held: dict[str, list[int]] = {}
    for rank, other in zip(dist.get_process_group_ranks(group), gather(value, group), strict=True):
        held.setdefault(repr(other), []).append(rank)
    if len(held) > 1:
        listed = "; ".join(f"{text} on ranks {ranks}" for text, ranks in held.items())
        raise AgreementError(f"{what}: the ranks hold {listed}; needs one value on all; compute it by the same rule")
    return value


def from_first(value: T, group: ProcessGroup) -> T:
    """The value of the group's first rank; what the other ranks pass is ignored."""
    box: list[T] = [value]
    dist.broadcast_object_list(box, src=dist.get_process_group_ranks(group)[0], group=group)
    return box[0]


def first_does(work: Callable[[], T], group: ProcessGroup) -> T:
    """What the work of the group's first rank gives, on all ranks, or the RlhfError that it raises; others do nothing.

    The work itself must not communicate.
    """
    found: tuple[T | None, RlhfError | None] = (None, None)
    if dist.get_rank() == dist.get_process_group_ranks(group)[0]:
        try:
            found = (work(), None)
        except RlhfError as error:
            found = (None, error)
    result, failure = from_first(found, group)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]  # the first rank has filled it


def any_of(flag: bool, group: ProcessGroup) -> bool:
    """True on all ranks when the flag is set on at least one."""
    return _reduced(float(flag), group, ReduceOp.MAX) > 0


def all_of(flag: bool, group: ProcessGroup) -> bool:
    """True on all ranks when the flag is set on each."""
    return _reduced(float(flag), group, ReduceOp.MIN) > 0


def sum_of(value: float, group: ProcessGroup) -> float:
    """The sum over the ranks, in float64."""
    return _reduced(value, group, ReduceOp.SUM)


def max_of(value: float, group: ProcessGroup) -> float:
    """The greatest over the ranks."""
    return _reduced(value, group, ReduceOp.MAX)


def min_of(value: float, group: ProcessGroup) -> float:
    """The least over the ranks."""
    return _reduced(value, group, ReduceOp.MIN)


def _reduced(value: float, group: ProcessGroup, op: ReduceOp.RedOpType) -> float:
    cell = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(cell, op=op, group=group)
    return float(cell[0])
