"""Process groups made once for a set of ranks, the same on every rank of the job."""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


class GroupFactory:
    """Makes process groups in program order and hands the same one out for the same ranks and backend.

    torch.distributed demands that every rank of the job takes part in making each group; so every rank calls
    `make` with the same arguments in the same order, members or not.
    """

    def __init__(self, *, device_backend: str, timeout: timedelta) -> None:
        self.device_backend = device_backend
        self._timeout = timeout
        self._made: dict[tuple[tuple[int, ...], str, str], ProcessGroup | None] = {}

    def make(self, rank_sets: Iterable[tuple[int, ...]], *, backend: str, purpose: str = "") -> ProcessGroup | None:
        """The group of rank_sets that this rank is in, or None. Collective over the whole job.

        Another purpose gives another group over the same ranks, whose messages cannot be taken for the first one's.
        """
        rank, mine = dist.get_rank(), None
        for ranks in rank_sets:
            key = (tuple(sorted(ranks)), backend, purpose)
            if key not in self._made:
                group = dist.new_group(list(key[0]), backend=backend, timeout=self._timeout)
                self._made[key] = group if rank in key[0] else None
            if rank in key[0]:
                mine = self._made[key]
        return mine

    def device_group(self, rank_sets: Iterable[tuple[int, ...]], *, purpose: str = "") -> ProcessGroup | None:
        """Like `make`, for tensors on the training device (NCCL on GPUs, gloo on CPUs)."""
        return self.make(rank_sets, backend=self.device_backend, purpose=purpose)

    def cpu_group(self, rank_sets: Iterable[tuple[int, ...]]) -> ProcessGroup | None:
        """Like `make`, for tensors in host memory (gloo): decisions, rows, waiting."""
        return self.make(rank_sets, backend="gloo")
