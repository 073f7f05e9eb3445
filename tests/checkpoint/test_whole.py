"""A file that cannot be read is not a damaged one: it is tried again, then told, and nothing is moved or removed."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf.checkpoint.folder import newest_whole, saved, step_name
from rlhf.checkpoint.saver import Content, Saver
from rlhf.checkpoint.whole import find_damage, find_fault
from rlhf.errors import UnreadableError
from tests.checkpoint.stored_blocks import tensors, wholes
from tests.harness.ranks import run_ranks


def save_steps(folder: Path, steps: tuple[int, ...], notes: list[str], *, keep_last: int) -> None:
    one = Saver(folder, group=None, keep_last=keep_last, keep_every=0, asynchronous=False, note=notes.append)
    for step in steps:
        one.save(step, Content(wholes(tensors(step)), {"driver.json": b"{}"}))
    one.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("rlhf.checkpoint.patience.PAUSES_S", (0.0, 0.0, 0.0))
    save_steps(tmp_path, (1, 2, 3), [], keep_last=3)
    return tmp_path


def refuses(monkeypatch: pytest.MonkeyPatch, path: Path, times: int, code: int = errno.EIO) -> Callable[[], int]:
    """Let the first reads of a file fail; gives how often they did."""
    failed, preadv, opens = 0, os.preadv, Path.read_bytes

    def fail() -> None:
        nonlocal failed
        if failed < times:
            failed += 1
            raise OSError(code, os.strerror(code), str(path))

    def read_at(handle: int, *args: object) -> int:
        if os.readlink(f"/proc/self/fd/{handle}") == str(path):
            fail()
        return preadv(handle, *args)

    def read_bytes(self: Path) -> bytes:
        if self == path:
            fail()
        return opens(self)

    monkeypatch.setattr(os, "preadv", read_at)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return lambda: failed


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_an_error_that_passes_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    failed = refuses(monkeypatch, folder / step_name(3) / name, times=3)
    assert newest_whole(folder, group=None, note=pytest.fail) == folder / step_name(3)
    assert failed() == 3


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_an_error_that_stays_is_told_as_one_and_no_older_checkpoint_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    refuses(monkeypatch, folder / step_name(3) / name, times=99, code=code)
    with pytest.raises(UnreadableError, match=rf"{name}.* could not be read \({os.strerror(code)}\).*it may be whole"):
        newest_whole(folder, group=None, note=pytest.fail)
    assert [path.name for path in saved(folder)] == [step_name(step) for step in (3, 2, 1)]


def test_damage_is_damage_though_another_file_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(monkeypatch, folder / step_name(3) / "__0_0.distcp", times=99)
    (folder / step_name(3) / "driver.json").unlink()
    assert find_damage(folder / step_name(3), group=None) == "driver.json: No such file or directory"


def test_an_old_checkpoint_that_cannot_be_read_is_neither_counted_nor_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    refuses(monkeypatch, folder / step_name(3) / "__0_0.distcp", times=99)
    save_steps(folder, (4,), notes, keep_last=2)
    assert [path.name for path in saved(folder)] == [step_name(step) for step in (4, 3, 2)]
    assert any("could not be read" in line and "it stays" in line for line in notes), notes
    monkeypatch.undo()
    notes.clear()
    save_steps(folder, (5,), notes, keep_last=2)
    assert [path.name for path in saved(folder)] == [step_name(step) for step in (5, 4)]
    assert notes == []


@pytest.mark.dist
def test_all_ranks_hear_of_what_one_could_not_read(folder: Path) -> None:
    run_ranks(2, one_cannot_read, folder)


def one_cannot_read(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("rlhf.checkpoint.patience.PAUSES_S", (0.0,))
        group = dist.new_group()
        for name in ("__0_0.distcp", "driver.json"):  # those of one rank, then of the other
            refuses(patches, folder / step_name(3) / name, times=99)
            fault = find_fault(folder / step_name(3), group=group)
            assert fault is not None
            assert not fault.is_damage
            with pytest.raises(UnreadableError, match="could not be read"):
                find_damage(folder / step_name(3), group=group)
            patches.undo()
            patches.setattr("rlhf.checkpoint.patience.PAUSES_S", (0.0,))
