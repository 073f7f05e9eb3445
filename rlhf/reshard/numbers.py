"""A few integers of every rank, brought together by all ranks of both pools."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.metrics.timers import Kind, SpanFn
from rlhf.reshard.checksum import wrapped


class GroupNumbers:
    """Gathers and adds up. Every call is collective over the group; numbers of each rank are equally many."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], device: torch.device, span: SpanFn) -> None:
        """`ranks`: those of the group, in the order of results. `device`: where the group's transport works."""
        self._group, self._ranks, self._device, self._span = group, ranks, device, span

    def gather(self, numbers: Sequence[int], name: str = "gather numbers") -> list[list[int]]:
        """The numbers of all ranks, in order of rank. `name`: of the span."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(own) for _ in self._ranks]
        with self._span(name, Kind.WAIT):
            dist.all_gather(rows, own, group=self._group)
        of_rank = dict(zip(dist.get_process_group_ranks(self._group), rows, strict=True))
        return [of_rank[rank].tolist() for rank in self._ranks]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the ranks modulo 2^64, as signed numbers."""
        own = torch.tensor([wrapped(number) for number in numbers], dtype=torch.int64, device=self._device)
        with self._span("add up numbers", Kind.WAIT):
            dist.all_reduce(own, group=self._group)
        found: list[int] = own.tolist()
        return found
