"""Saves that are killed before calls that change the disk, in processes forked off this one.

Run as a program, for the processes it forks must have no thread but their own: `python -m tests.checkpoint.killed_saves
FOLDER`. Prints one line a scenario, ends with a traceback at the first checkpoint that is not what it should be.
"""

import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf.checkpoint.folder import latest, newest_whole, saved, step_name, step_of
from rlhf.checkpoint.load import check_state, load
from rlhf.checkpoint.saver import Content, Saver
from tests.checkpoint.stored_blocks import tensors, uneven_shares, wholes

CALLS = ("mkdir", "open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "unlink", "rmdir")
"""Functions of os through which a save changes the disk."""

KEEP_LAST = 2


def die_at(number: int) -> Callable[[], int]:
    """Wrap the calls so that this process is killed right before one of them; gives how many there were."""
    count = 0

    def wrapped(call: Callable) -> Callable:
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    return lambda: count


def in_child(work: Callable[[], None], *, may_fail: bool = False) -> Callable[[], int]:
    """Start it in a forked process; gives a function that waits for its exit status (-9: killed)."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:  # only after an error
            if not may_fail:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_steps(folder: Path, rank: int, num_ranks: int, steps: tuple[int, ...], *, asynchronous: bool) -> None:
    """Save some steps, this rank's share of tensors that the step seeds."""
    group = None
    if num_ranks > 1:
        store = dist.FileStore(str(folder.parent / f"store_{folder.name}_{steps[0]}"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=20))
        group = dist.group.WORLD
    saver = Saver(folder, group=group, keep_last=KEEP_LAST, keep_every=0, asynchronous=asynchronous, note=print)
    for step in steps:
        shares = uneven_shares(tensors(step))
        blocks = shares[rank] if num_ranks > 1 else [*shares[0], *shares[1]]
        saver.save(step, Content(blocks, {f"rng/rank_{rank}.pt": b"state of %d" % step}))
    assert saver.wait() is not None
    if num_ranks > 1:
        dist.destroy_process_group()


def loadable(folder: Path, notes: list[str]) -> int:
    """The step that a resume takes; what is loaded is what that step saved."""
    path = newest_whole(folder, group=None, note=notes.append)
    assert path is not None, f"nothing whole in {folder}: {notes}"
    expected = tensors(step_of(path))
    found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    load(path, wholes(found), group=None)
    assert all(torch.equal(found[key], expected[key]) for key in expected), path
    check_state(path, wholes(found), group=None)
    return step_of(path)


def after_a_kill(folder: Path, steps: tuple[int, ...]) -> int:
    """What must hold wherever a save of the last of these steps was killed; all but it were saved before."""
    notes: list[str] = []
    found = loadable(folder, notes)
    assert found in steps[-2:], (found, notes)
    assert not notes, notes  # what is visible is whole
    named = latest(folder)
    assert named is not None
    assert named.is_dir()
    assert found == max(step_of(path) for path in saved(folder))  # whatever `latest` says
    assert {step_of(path) for path in saved(folder)} >= {steps[-2]} - ({steps[-1]} if steps[-1] == steps[-2] else set())
    return found


def scenarios(folder: Path) -> Iterator[str]:
    """Each kind of save, killed before every EVERY-th call of every rank; `every=1` takes a minute longer."""
    yield every_point(folder / "alone", 1, (1, 2, 3), asynchronous=False, every=2)  # removes step 1 at the end
    yield every_point(folder / "again", 1, (1, 2, 2), asynchronous=False, every=3)  # puts step 2 in the place of step 2
    yield every_point(folder / "background", 1, (1, 2, 3), asynchronous=True, every=4)
    yield every_point(folder / "ranks", 2, (1, 2, 3), asynchronous=False, every=6)
    yield short_files(folder / "short files")


def every_point(folder: Path, num_ranks: int, steps: tuple[int, ...], *, asynchronous: bool, every: int) -> str:
    """Kill a save of the last step, rank by rank, call by call; what all other steps left is there before."""
    before = folder / "before"
    before.mkdir(parents=True)
    save_steps(before, 0, 1, steps[:-1], asynchronous=False)
    outcomes = {step: 0 for step in steps[-2:]}
    ahead_of_latest = 0
    for victim in range(num_ranks):
        number, finished = 1, False
        while not finished:
            run = folder / f"{victim}_{number}"
            shutil.copytree(before, run)
            statuses = trial(run, num_ranks, steps[-1], victim, number, asynchronous=asynchronous)
            finished = statuses[victim] == 0
            assert finished or statuses[victim] == -signal.SIGKILL, statuses
            found = after_a_kill(run, steps)
            outcomes[found] += 1
            ahead_of_latest += latest(run) != run / step_name(found)
            save_steps(run, 0, 1, (steps[-1] + 1,), asynchronous=False)
            assert loadable(run, []) == steps[-1] + 1
            assert not [path for path in run.iterdir() if path.name.startswith(".")], sorted(run.iterdir())
            shutil.rmtree(run)
            number += every
    assert ahead_of_latest or steps[-1] == steps[-2], "no kill between a checkpoint's name and `latest`"
    return f"{folder.name}: {outcomes}, {ahead_of_latest} of them before `latest` was written"


def trial(run: Path, num_ranks: int, step: int, victim: int, number: int, *, asynchronous: bool) -> list[int]:
    """Exit statuses of ranks that save a step, one of them killed."""

    def work(rank: int) -> None:
        if rank == victim:
            die_at(number)
        save_steps(run, rank, num_ranks, (step,), asynchronous=asynchronous)

    waits = [in_child(partial(work, rank), may_fail=True) for rank in range(num_ranks)]
    return [wait() for wait in waits]


def short_files(run: Path) -> str:
    """A save by a process whose files the system cuts short."""
    run.mkdir()
    save_steps(run, 0, 1, (1, 2), asynchronous=False)

    def save_short() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        notes: list[str] = []
        saver = Saver(run, group=None, keep_last=KEEP_LAST, keep_every=0, asynchronous=True, note=notes.append)
        saver.save(3, Content(wholes(tensors(3)), {}))
        assert saver.wait() is None
        assert "checkpoint of step 3 was not saved: rank 0: write: File too large" in notes[0], notes

    assert in_child(save_short)() == 0
    return f"{run.name}: {after_a_kill(run, (1, 2, 3))}"


if __name__ == "__main__":
    for line in scenarios(Path(sys.argv[1])):
        print(line, flush=True)
