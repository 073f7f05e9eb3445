"""A rank that does what the test says: the smallest program that lives in a job. Imports torch, rich and rlhf.dist only.

RLHF_TEST_MODE=hang scripts/launch.sh --module tests.dist.death_worker CONFIG
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from rlhf.config.load import load_config
from rlhf.dist.job import Ranks, job
from rlhf.errors import DataError, PeerLostError, SaveError


def work(ranks: Ranks) -> None:
    """Steps without end: a bit of work and a collective, until asked to stop."""
    everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
    while not ranks.stop.agreed(everyone):
        ranks.progress.tick("rollout")
        time.sleep(0.05)
        ranks.progress.tick("update")
        dist.all_reduce(torch.ones(3), group=everyone)


def work_with_children(ranks: Ranks) -> None:
    """Like work, with a child process and a shared-memory segment on each rank."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    mp.set_sharing_strategy("file_system")
    shared = torch.ones(1000).share_memory_()
    (ranks.run_folder / f"ready_{ranks.rank}").touch()
    work(ranks)
    del shared


def finish(ranks: Ranks) -> None:
    """Nothing, well."""
    print(f"hello of rank {ranks.rank}")
    os.write(1, f"raw words of rank {ranks.rank}\n".encode())


def show_console(ranks: Ranks) -> None:
    """What a display on rank 0 finds."""
    if ranks.rank == 0:
        print(f"terminal: {sys.stdout.isatty()}, size {Console().size}")


def raise_on_rank_1(ranks: Ranks) -> None:
    """Rank 1 raises while the others sit in a collective."""
    everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
    ranks.progress.tick("score")
    if ranks.rank == 1:
        time.sleep(0.5)
        raise KeyError("no such thing on rank 1")
    dist.barrier(everyone)


def read_of_the_dead(ranks: Ranks) -> None:
    """Rank 1 is killed without a word, and rank 0 finds that it cannot be read any more."""
    everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
    ranks.progress.tick("rollout/sync")
    dist.barrier(everyone)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise PeerLostError("reshard: rank 0 cannot read the memory of rank 1: No such process")


def hang_on_rank_1(ranks: Ranks) -> None:
    """Rank 1 neither ticks nor joins the collective, but is alive."""
    everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
    ranks.progress.tick("score")
    if ranks.rank == 1:
        time.sleep(600)
    dist.barrier(everyone)


def never_begins_on_node_1(ranks: Ranks) -> None:
    """For the nodes that do: main holds the others up before the job."""
    work(ranks)


def bad_data(ranks: Ranks) -> None:
    """What a loader does with a broken file."""
    raise DataError("rows.jsonl:3: not JSON; needs one object a line; mend the line")


def stop_unsaved(ranks: Ranks) -> None:
    """A stop that was agreed to, and then the disk is full."""
    ranks.stop.path.touch()
    work(ranks)
    raise SaveError("checkpoint: the run ends after step 3 and could not be saved there")


def crash_in_c(ranks: Ranks) -> None:
    """A segmentation fault, with words that C code printed before it."""
    os.write(2, b"free(): invalid pointer\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def main() -> None:
    if os.environ["RLHF_TEST_MODE"] == "never_begins_on_node_1" and os.environ["RLHF_NODE_RANK"] == "1":
        time.sleep(600)
    config = load_config(sys.argv[1:])
    with job(config.job, run_folder=Path(config.log.folder) / config.name) as ranks:
        globals()[os.environ["RLHF_TEST_MODE"]](ranks)


if __name__ == "__main__":
    main()
