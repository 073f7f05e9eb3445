"""Which of several replaced checkpoints of one step comes back when a replacement was cut."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.folder import newest_whole, put_back, step_name
from rlhf.checkpoint.load import load
from rlhf.checkpoint.saver import Content, Saver
from tests.checkpoint.stored_blocks import tensors, wholes

STEP = 3


def save_as(folder: Path, name: str, *, value: int, step: int = STEP, at: int) -> Path:
    """A whole checkpoint under another name, its save ended at a time."""
    one = Saver(folder, group=None, keep_last=1, keep_every=0, asynchronous=False, note=pytest.fail)
    one.save(step, Content(wholes(tensors(value)), {"driver.json": b"{}"}))
    path = one.wait()
    assert path is not None
    os.utime(path / "manifest.json", (at, at))
    return path.rename(folder / name)


def value_in(path: Path) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    load(path, wholes(found), group=None)
    return found


@pytest.mark.parametrize("suffixes", [("aaaa", "bbbb"), ("bbbb", "aaaa")])
@pytest.mark.parametrize("spoiled", ["nothing", "manifest", "a file", "a size", "the step"])
def test_of_two_replaced_ones_the_whole_one_comes_back_and_of_whole_ones_the_later(
    tmp_path: Path, suffixes: tuple[str, str], spoiled: str
) -> None:
    """The older is good; the younger too (then it is taken), or what a removal that was cut has left of one."""
    parts = tmp_path / "parts"
    older = save_as(parts / "a", "old", value=7, at=1000)
    younger = save_as(parts / "b", "young", value=9, step=STEP + (spoiled == "the step"), at=2000)
    if spoiled == "manifest":
        (younger / "manifest.json").unlink()
    if spoiled == "a file":
        (younger / "driver.json").unlink()
    if spoiled == "a size":
        os.truncate(younger / "__0_0.distcp", 100)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for path, suffix in zip((older, younger), suffixes, strict=True):
        shutil.move(path, folder / f".{step_name(STEP)}.replaced-{suffix}")
    assert newest_whole(folder, group=None, note=pytest.fail) == folder / step_name(STEP)
    wanted = tensors(9 if spoiled == "nothing" else 7)
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in value_in(folder / step_name(STEP)).items())
    assert len(list(folder.iterdir())) == 2  # the other one waits to be swept up


def test_a_single_one_comes_back_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / f".{step_name(STEP)}.replaced-cc").mkdir()
    put_back(tmp_path)
    assert (tmp_path / step_name(STEP)).is_dir()
