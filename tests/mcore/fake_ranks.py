"""Any rank of any layout in one process: groups that know who is in them and send nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.mcore.groups import ModelGroups, make_groups


class _FakeGroups(GroupFactory):
    def make(self, rank_sets: Iterable[tuple[int, ...]], *, backend: str, purpose: str = "") -> ProcessGroup | None:
        return super().make(rank_sets, backend="fake", purpose=purpose)


@contextmanager
def as_rank(parallel: ParallelConfig, rank: int) -> Iterator[ModelGroups]:
    """Groups of one rank of a model's pool, which is the end of the job."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=max(parallel.ranks) + 1)
    try:
        yield make_groups(parallel, _FakeGroups(device_backend="fake", timeout=timedelta(seconds=1)))
    finally:
        dist.destroy_process_group()
