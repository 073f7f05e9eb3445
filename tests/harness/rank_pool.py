"""Processes that are kept between calls, so that ranks import torch and Megatron once and not for every test.

A rank that fails takes all ranks of its call with it; the next call starts new ones in their places.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.harness.left_behind import Before

TIMEOUT = timedelta(seconds=60)
"""Of a collective among the ranks."""
CONSEQUENCES_S = 1.0
"""After a rank has failed, how long the others' errors are waited for."""
END_S = 5.0
"""How long a process may take to end when it is asked to."""


class RankError(AssertionError):
    """A rank raised, died, or left something behind that would change the next call's ranks."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One call on one rank."""

    rank: int
    world_size: int
    store: Path
    env: dict[str, str]
    cwd: str
    call: bytes
    """The pickled function and its arguments: an import that fails is the task's error."""


@dataclass(frozen=True, slots=True)
class _Done:
    """How a task ended."""

    error: str
    """Empty when it went well."""
    keep: bool
    """Whether the process may serve another call."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection

    def end(self) -> None:
        """Close the pipe and wait for the process; kill it when it does not leave."""
        self.pipe.close()
        self.process.join(timeout=END_S)
        self.kill()

    def kill(self) -> None:
        """End the process now; does nothing to one that has ended."""
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class RankPool:
    """Worker processes; worker n is rank n of every call with more than n ranks. Starts them when they are needed."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(self, world_size: int, fn: Callable[..., None], args: Sequence[object]) -> None:
        """Call fn(*args) on world_size ranks, each with a gloo process group of them all.

        Raises:
            RankError: A rank raised, died or left something behind; with its traceback.
        """
        workers = self._first(world_size)
        try:
            with tempfile.TemporaryDirectory() as folder:
                call = pickle.dumps((fn, args))  # tensors by value, not in shared memory
                for rank, worker in enumerate(workers):
                    store = Path(folder) / "store"
                    worker.pipe.send(_Task(rank, world_size, store, dict(os.environ), os.getcwd(), call))
                kept = _collect(workers)
        except BaseException:  # a test that is interrupted, too
            self._replace(workers)
            raise
        self._replace([worker for worker in workers if worker not in kept])

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _first(self, count: int) -> list[_Worker]:
        """The first workers; those that have died are replaced."""
        for at, worker in enumerate(self._workers[:count]):
            if not worker.process.is_alive():
                worker.kill()
                self._workers[at] = _start()
        self._workers += [_start() for _ in range(count - len(self._workers))]
        return self._workers[:count]

    def _replace(self, gone: Sequence[_Worker]) -> None:
        """End these; the next call starts others in their places."""
        for worker in gone:
            worker.kill()


def _start() -> _Worker:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))  # no daemon, for those may have no children
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _collect(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until all tasks are done; those whose processes may go on.

    Raises:
        RankError: As soon as one has failed; with the errors of those that fail a moment later, of which one may be
            the cause.
    """
    waiting, kept = {worker.pipe: rank for rank, worker in enumerate(workers)}, []
    errors: dict[int, str] = {}
    while waiting and (ready := wait(list(waiting), timeout=CONSEQUENCES_S if errors else None)):
        for pipe in ready:
            rank = waiting.pop(pipe)
            done = _result(workers[rank])
            if done.error:
                errors[rank] = done.error
            elif done.keep:
                kept.append(workers[rank])
    if errors:
        raise RankError("\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors)))
    return kept


def _result(worker: _Worker) -> _Done:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return _Done(f"died with exit code {worker.process.exitcode}", keep=False)


def _serve(pipe: Connection) -> None:
    """A worker's life: one task after the other until the other end of the pipe is closed."""
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        pipe.send(_do(task))


def _do(task: _Task) -> _Done:
    """Run one task in a process group of its own and look at what it leaves behind."""
    os.environ.clear()
    os.environ.update(task.env, RANK=str(task.rank), LOCAL_RANK=str(task.rank), WORLD_SIZE=str(task.world_size))
    os.chdir(task.cwd)
    try:
        fn, args = pickle.loads(task.call)
        before = Before()
        _call(task, fn, args)
        patched = before.patched_imports()
        before.put_back()
        if left := before.left():
            return _Done(f"{fn.__module__}.{fn.__qualname__} left behind: {'; '.join(left)}", keep=False)
        return _Done("", keep=not patched)
    except BaseException:  # noqa: BLE001  # whatever it is, the caller gets to see it
        return _Done(traceback.format_exc(), keep=False)


def _call(task: _Task, fn: Callable[..., None], args: Sequence[object]) -> None:
    store = dist.FileStore(str(task.store), task.world_size)  # a file, so no port can be taken
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=TIMEOUT)
    dist.barrier()  # else a rank that has nothing to do is gone before the others have found it
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()
