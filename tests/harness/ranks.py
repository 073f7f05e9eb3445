"""Run one function on several gloo ranks on this machine's CPUs."""

import atexit
from collections.abc import Callable

from tests.harness.rank_pool import RankPool

_POOL = RankPool()
atexit.register(_POOL.close)


def run_ranks(world_size: int, fn: Callable[..., None], *args: object) -> None:
    """Call fn(*args) on world_size ranks. The first rank to fail fails the caller.

    fn must be importable (module level): each rank is a spawned process, kept for the calls that follow. It has the
    caller's environment and a process group of its own. What it sets on modules and classes of this project and of
    Megatron is undone afterwards; threads, child processes and changed settings of torch that it leaves are an error.

    Raises:
        RankError: A rank raised, died or left something behind.
    """
    _POOL.run(world_size, fn, args)
