"""Saves that end well, that fail, and that are killed: what a resume finds afterwards."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.checkpoint.folder import newest_whole, saved, settle, step_name
from rlhf.checkpoint.load import check_state, load
from rlhf.checkpoint.manifest import read_manifest
from rlhf.checkpoint.saver import Content, Saver
from rlhf.checkpoint.store.data_file import HostCopy
from rlhf.checkpoint.store.file_plan import Window, plan_file
from rlhf.checkpoint.whole import find_damage
from rlhf.errors import CheckpointError
from tests.checkpoint.stored_blocks import block, tensors, uneven_shares, wholes
from tests.harness.ranks import run_ranks

REPO = Path(__file__).parents[2]


def saver(
    folder: Path, notes: list[str], *, asynchronous: bool = False, keep_last: int = 2, keep_every: int = 0
) -> Saver:
    return Saver(
        folder, group=None, keep_last=keep_last, keep_every=keep_every, asynchronous=asynchronous, note=notes.append
    )


def content(step: int) -> Content:
    return Content(wholes(tensors(step)), {"driver.json": b"{}", "roles/actor.json": b'{"steps": %d}' % step})


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    load(path, wholes(found), group=None)
    return found


def same(found: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(found[key], tensor) for key, tensor in tensors(step).items())


def three_steps(folder: Path) -> list[str]:
    """A folder with steps 1, 2 and 3; what the saver said."""
    notes: list[str] = []
    one = saver(folder, notes, keep_last=3)
    for step in (1, 2, 3):
        one.save(step, content(step))
    one.wait()
    return notes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_kept_and_what_latest_names(tmp_path, asynchronous):
    notes: list[str] = []
    one = saver(tmp_path, notes, asynchronous=asynchronous, keep_every=4)
    assert one.wait() is None
    for step in (2, 4, 6, 8, 9, 10):
        one.save(step, content(step))
    assert one.wait() == tmp_path / "step_00000010"
    assert [path.name for path in saved(tmp_path)] == [step_name(step) for step in (10, 9, 8, 4)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert (tmp_path / "latest").read_text() == "step_00000010\n"
    assert same(loaded(tmp_path / "step_00000004"), 4)
    assert (tmp_path / "step_00000010/roles/actor.json").read_bytes() == b'{"steps": 10}'
    assert newest_whole(tmp_path, group=None, note=notes.append) == tmp_path / "step_00000010"
    assert not notes


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, asynchronous):
    flushed, renamed, fsync, rename = set[str](), list[str](), os.fsync, Path.rename

    def watched_fsync(handle: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def watched_rename(self: Path, target: Path) -> Path:
        if target.name == "step_00000001":
            assert {str(self), *map(str, self.rglob("*"))} <= flushed
            assert str(tmp_path) not in flushed
            renamed.append(target.name)
        return rename(self, target)

    one = saver(tmp_path, [], asynchronous=asynchronous)
    flushed.clear()
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    one.save(1, content(1))
    assert one.wait() is not None
    assert renamed == ["step_00000001"]
    assert str(tmp_path) in flushed  # its name, and that of `latest`


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    def refuse(self: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CheckpointError, match=r"Read-only file system; needs a folder that can be written to"):
        saver(tmp_path, [])


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path):
    three_steps(tmp_path)
    data = tmp_path / "step_00000002/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    notes: list[str] = []
    one = saver(tmp_path, notes, keep_last=3)
    one.save(4, content(4))
    assert [path.name for path in saved(tmp_path)] == [step_name(step) for step in (4, 3, 1)]


def test_a_run_that_went_back_goes_on_from_where_it_went_to(tmp_path):
    """Step 3 is damaged when the run begins at step 2, and can be read again later: it is of a past that was left."""
    three_steps(tmp_path)
    manifest, aside = tmp_path / "step_00000003/manifest.json", tmp_path / "manifest.json"
    manifest.rename(aside)
    notes: list[str] = []
    assert newest_whole(tmp_path, group=None, note=notes.append) == tmp_path / "step_00000002"
    (left,) = settle(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert left.name.startswith("step_00000003.left-")
    aside.rename(left / "manifest.json")
    assert newest_whole(tmp_path, group=None, note=notes.append) == tmp_path / "step_00000002"
    saver(tmp_path, notes).save(3, content(9))
    assert same(loaded(newest_whole(tmp_path, group=None, note=notes.append)), 9)
    assert same(loaded(left), 3)


def test_a_checkpoint_that_latest_does_not_name_yet_is_taken_and_named(tmp_path):
    three_steps(tmp_path)
    (tmp_path / "latest").write_text("step_00000002\n")
    assert newest_whole(tmp_path, group=None, note=pytest.fail) == tmp_path / "step_00000003"
    assert settle(tmp_path, 3) == []
    assert (tmp_path / "latest").read_text() == "step_00000003\n"


def test_any_flipped_or_missing_byte_of_any_file_is_found_and_the_one_before_taken(tmp_path):
    three_steps(tmp_path)
    victim = tmp_path / step_name(3)
    files = sorted(path for path in victim.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {".metadata", "common.pt", "manifest.json", "__0_0.distcp", "actor.json"}
    for path in files:
        whole = path.read_bytes()
        places = sorted({*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1})
        damaged = [whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :] for at in places]
        for content_now in [*damaged, whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"]:
            path.write_bytes(content_now)
            damage = find_damage(victim, group=None)
            assert damage is not None, path
            assert path.name in damage, damage
        path.unlink()
        assert path.name in find_damage(victim, group=None)
        notes: list[str] = []
        assert newest_whole(tmp_path, group=None, note=notes.append) == tmp_path / step_name(2)
        assert len(notes) == 1
        assert path.name in notes[0]
        assert "step_00000003" in notes[0]
        assert notes[0].endswith("trying step_00000002")
        path.write_bytes(whole)
    assert find_damage(victim, group=None) is None


@pytest.mark.parametrize(
    ("call", "asynchronous"),
    [("write", False), ("pwrite", True), ("fsync", True), ("fsync", False), ("mkdir", False), ("rename", True)],
)
def test_a_disk_that_refuses_any_call_costs_that_save_alone(tmp_path, monkeypatch, call, asynchronous):
    notes: list[str] = []
    one = saver(tmp_path, notes, asynchronous=asynchronous)
    one.save(1, content(1))
    one.wait()
    real, refused, step = getattr(os, call), 0, 2
    for number in range(1, 100):
        count = 0

        def full(*args, number=number, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, full)
        one.save(step, content(step))
        path = one.wait()
        monkeypatch.setattr(os, call, real)
        if count < number:
            break
        refused += 1
        if path is None:
            assert "No space left on device" in notes[-1]
            assert f"step {step}" in notes[-1]
        best = newest_whole(tmp_path, group=None, note=notes.append)
        assert best in (tmp_path / step_name(step - 1), tmp_path / step_name(step))
        assert same(loaded(best), int(best.name[5:]))
        one.save(step, content(step))
        assert one.wait() == tmp_path / step_name(step)
        assert same(loaded(one.wait()), step)
        step += 1
    assert refused >= {"write": 6, "pwrite": 1, "fsync": 8, "mkdir": 1, "rename": 2}[call]
    assert not [line for line in notes if "damaged" in line]
    saver(tmp_path, notes)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_step_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    three_steps(tmp_path)
    notes: list[str] = []
    one, rename = saver(tmp_path, notes), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    one.save(3, content(9))
    assert one.wait() is None
    assert "checkpoint of step 3 was not saved" in notes[0]
    assert same(loaded(tmp_path / "step_00000003"), 3)


def test_what_cannot_be_tidied_after_a_save_is_told_and_costs_no_save(tmp_path, monkeypatch):
    three_steps(tmp_path)
    notes: list[str] = []
    one, unlink, replace = saver(tmp_path, notes), os.unlink, Path.replace

    def refuse(path, *args, dir_fd=None, **kwargs):
        if path == "manifest.json":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, *args, dir_fd=dir_fd, **kwargs)

    def read_only(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "replace", read_only)
    one.save(3, content(9))
    assert one.wait() == tmp_path / "step_00000003"
    said = [line for line in notes if line.startswith("checkpoint of step 3 is whole, but ")]
    assert ["latest could not be made to name it: Read-only" in line for line in said] == [True, False]
    assert "replaced-" in said[1]
    assert "could not be removed: Device or resource busy" in said[1]
    assert same(loaded(newest_whole(tmp_path, group=None, note=pytest.fail)), 9)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(Path, "replace", replace)
    saver(tmp_path, notes)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_bad_blocks_and_bad_names_cost_that_save_alone(tmp_path):
    notes: list[str] = []
    one, held = saver(tmp_path, notes), tensors()
    for bad, message in [
        (Content([block(held, "final_norm.weight", (0, 5))], {}), "7 of 12 elements of final_norm.weight"),
        (Content(wholes(held), {"../x": b""}), "../x"),
        (Content(wholes(held), {"manifest.json": b""}), "manifest.json"),
        (Content(wholes(held), {"__7_0.distcp": b""}), "__7_0.distcp"),
    ]:
        one.save(1, bad)
        assert one.wait() is None
        assert message in notes[-1]
    assert saved(tmp_path) == []
    assert newest_whole(tmp_path, group=None, note=notes.append) is None
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits(tmp_path, monkeypatch):
    notes: list[str] = []
    one, held, gate, real = saver(tmp_path, notes, asynchronous=True), tensors(1), threading.Event(), os.open
    monkeypatch.setattr(os, "open", lambda *args: (gate.wait(30), real(*args))[1])  # before any element is asked for
    one.save(1, Content(wholes(held), {}))
    for key, tensor in tensors(2).items():
        held[key].copy_(tensor)  # a training step
    second = threading.Thread(target=one.save, args=(2, Content(wholes(held), {})))
    second.start()
    time.sleep(0.2)
    assert second.is_alive()
    assert saved(tmp_path) == []
    gate.set()
    second.join(30)
    assert one.wait() == tmp_path / step_name(2)
    assert same(loaded(tmp_path / step_name(1)), 1)
    assert same(loaded(tmp_path / step_name(2)), 2)


def two_ranks(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patches:
        saved_and_loaded(folder, patches)


def saved_and_loaded(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """Shares of two ranks, without locks, no file opened by both; read by two in another cut; a rank that is late."""
    rank, notes, opened, real = dist.get_rank(), [], [], os.open

    def no_lock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    def recording(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            opened.append(Path(path).name)
        return real(path, flags, *args, **kwargs)

    for name in ("flock", "lockf", "fcntl"):
        patches.setattr(fcntl, name, no_lock)
    patches.setattr(os, "open", recording)
    group = dist.new_group(timeout=timedelta(seconds=30))
    one = Saver(folder, group=group, keep_last=2, keep_every=0, asynchronous=True, note=notes.append)
    for step in (1, 2, 3):
        files = {f"rng/rank_{rank}.pt": b"%d" % rank} | ({"driver.json": b"{}"} if rank == 0 else {})
        one.save(step, Content(uneven_shares(tensors(step))[rank], files))
        dist.all_reduce(torch.ones(1))  # training's own collectives, meanwhile
    assert one.wait() == folder / step_name(3)
    patches.setattr(os, "open", real)
    everyone = [None, None]
    dist.all_gather_object(everyone, opened, group=group)
    assert not set(everyone[0]) & set(everyone[1])
    path = newest_whole(folder, group=group, note=notes.append)
    assert path == folder / step_name(3)
    assert read_manifest(path).num_ranks == 2

    found = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    share = uneven_shares(found)[1 - rank]
    load(path, share, group=group)
    state = check_state(path, share, group=group)
    assert state == read_manifest(path).state
    assert state.render().startswith("4 tensors, 0.000 GB, checksum ")
    if rank == 0:
        found["final_norm.weight"].view(torch.int32)[3] ^= 1
    with pytest.raises(CheckpointError, match=r"final_norm\.weight"):
        check_state(path, share, group=group)
    if rank == 1:
        share = [*share, block({"final_norm.weight": torch.zeros(12)}, "final_norm.weight", (0, 12))]
        share[-1] = type(share[-1])("norm", *[getattr(share[-1], name) for name in ("shape", "box", "data")])
    with pytest.raises(CheckpointError, match=r"rank 1: .*no tensor norm"):
        load(path, share, group=group)
    assert not notes, notes

    data = path / "__1_0.distcp"
    if rank == 0:
        with data.open("r+b") as file:
            file.seek(500)
            file.write(b"!")
    dist.barrier()
    assert newest_whole(folder, group=group, note=notes.append) == folder / step_name(2)
    assert (len(notes), "__1_0.distcp" in "".join(notes)) == ((1, True) if rank == 0 else (0, False))

    real_pwrite, notes[:] = os.pwrite, []
    if rank == 1:
        patches.setattr(os, "pwrite", no_lock)
    one.save(4, Content(uneven_shares(tensors(4))[rank], {}))
    assert one.wait() is None
    assert notes == (
        ["checkpoint of step 4 was not saved: rank 1: write: No locks available; the ones before are as they were"]
        if rank == 0
        else []
    )
    patches.setattr(os, "pwrite", real_pwrite)

    late = dist.new_group(timeout=timedelta(seconds=1))
    slow = Saver(folder, group=late, keep_last=2, keep_every=0, asynchronous=True, note=notes.append)
    if rank == 1:
        patches.setattr(os, "pwrite", lambda *args: (time.sleep(3), real_pwrite(*args))[1])
    slow.save(5, Content(uneven_shares(tensors(5))[rank], {}))
    with pytest.raises(RuntimeError):
        slow.wait()
    assert not (folder / step_name(5)).exists()


@pytest.mark.dist
def test_two_ranks_save_and_load_in_another_cut_and_fail_together(tmp_path):
    run_ranks(2, two_ranks, tmp_path)


@pytest.mark.dist
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(tmp_path):
    """Before calls that change the disk, all through a save: making, writing, flushing, naming, removing.

    And where the system itself refuses to write more.
    """
    command = [sys.executable, "-m", "tests.checkpoint.killed_saves", tmp_path]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert lines.keys() == {"alone", "again", "background", "ranks", "short files"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_slow_disk_is_seen_to_move(asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    taken = HostCopy.of

    def slowly(host: HostCopy, window: Window) -> torch.Tensor:
        time.sleep(0.05)
        return taken(host, window)

    monkeypatch.setattr(HostCopy, "of", slowly)
    monkeypatch.setattr("rlhf.checkpoint.saver.plan_file", partial(plan_file, window_bytes=512))
    monkeypatch.setattr("rlhf.checkpoint.saver.LOOK_S", 0.005)
    one = Saver(
        tmp_path,
        group=None,
        keep_last=1,
        keep_every=0,
        asynchronous=asynchronous,
        note=print,
        tick=lambda: moved.append(1),
    )
    one.save(1, content(1))
    assert one.wait() is not None
    assert len(moved) >= 3


def test_a_load_is_seen_to_move(tmp_path: Path) -> None:
    three_steps(tmp_path)
    moved: list[str] = []
    path = newest_whole(tmp_path, group=None, note=pytest.fail, tick=lambda: moved.append("checked"))
    assert path is not None
    assert len(moved) == len(read_manifest(path).files)  # small ones, a piece each
    moved.clear()
    load(path, wholes(tensors()), group=None, tick=lambda: moved.append("read"))
    assert len(moved) == len(tensors())
