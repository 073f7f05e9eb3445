"""Kept ranks are as good as new ones: what a test does to its process is undone, told, or ends the process."""

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf import errors
from tests.harness import hf_models
from tests.harness.left_behind import Before
from tests.harness.rank_pool import RankError, RankPool

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def pids(pool: RankPool, folder: Path, world_size: int = 2) -> list[int]:
    """Of the ranks that serve a call."""
    pool.run(world_size, write_pid, (folder,))
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(world_size)]


def write_pid(folder: Path) -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    assert dist.get_rank() == int(os.environ["RANK"])
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))


def change_what_is_undone(own: torch.Tensor) -> None:
    own += 1
    assert own.tolist() == [1.0, 1.0]  # of this rank alone
    errors.DataError.__init__ = lambda *_: None
    errors.extra = hf_models.ROPE_LLAMA3 = None
    os.environ["LEFT"] = "1"
    os.chdir("/")
    torch.set_num_threads(3)
    torch.manual_seed(5)


def see_nothing_of_it() -> None:
    assert str(errors.DataError("words")) == "words"
    assert not hasattr(errors, "extra")
    assert hf_models.ROPE_LLAMA3["factor"] == 3.7
    assert "LEFT" not in os.environ
    assert Path.cwd() != Path("/")
    assert os.environ["FROM_THE_CALLER"] == "2"
    assert torch.get_num_threads() != 3
    assert torch.initial_seed() != 5


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_ranks_are_kept_and_what_a_call_set_is_undone(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pids(pool, tmp_path)
    assert pids(pool, tmp_path) == first
    assert pids(pool, tmp_path, 1) == first[:1]
    pool.run(2, change_what_is_undone, (torch.zeros(2),))
    monkeypatch.setenv("FROM_THE_CALLER", "2")
    pool.run(2, see_nothing_of_it, ())
    assert pids(pool, tmp_path) == first


def test_a_rank_that_fails_fails_the_caller_and_all_ranks_are_new(pool: RankPool, tmp_path: Path) -> None:
    first = pids(pool, tmp_path)
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*KeyError: 'no such thing'"):
        pool.run(2, raise_on_rank_1, ())
    second = pids(pool, tmp_path)
    assert not set(first) & set(second)
    with pytest.raises(RankError, match="rank 1: died with exit code -9"):
        pool.run(2, die_on_rank_1, ())
    assert not set(second) & set(pids(pool, tmp_path))


def leave_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def test_what_is_left_is_the_callers_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"leave_default_dtype left behind: torch's default dtype: torch\.float64, was"):
        pool.run(1, leave_default_dtype, ())


def test_threads_children_and_settings_are_found() -> None:
    before, wanted = Before(), threading.Event()
    thread = threading.Thread(target=wanted.wait, name="waits", daemon=True)
    thread.start()
    child = subprocess.Popen(["sleep", "600"])
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        settings, *alive = before.left(patience_s=0.0)
    finally:
        wanted.set()
        child.kill()
        child.wait()
        thread.join()
        signal.signal(signal.SIGUSR1, handler)
    assert settings.startswith("handlers of signals: ")
    assert alive == ["thread waits", f"child process {child.pid}"]
    assert before.left() == []


def test_an_import_under_a_patch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rlhf.dist.late_start"
    monkeypatch.delitem(sys.modules, name, raising=False)
    before = Before()
    module = importlib.import_module(name)
    assert before.patched_imports() == []
    module.late_start = leave_default_dtype
    assert before.patched_imports() == [f"{name}.late_start"]
    monkeypatch.delitem(sys.modules, name)
