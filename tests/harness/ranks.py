"""Run one function on several gloo ranks on this machine's CPUs."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, world_size: int, store_path: str, fn: Callable[..., None], args: tuple) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(store_path, world_size)  # a file, so no port can be taken
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, fn: Callable[..., None], *args: object) -> None:
    """Call fn(*args) on world_size ranks. The first rank to fail fails the caller.

    fn must be importable (module level), for each rank is a spawned process.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (world_size, f"{folder}/store", fn, args), nprocs=world_size)
