"""What a conversion refuses: the message names it, the exit code is 2, and nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.checkpoint.convert.command import main

Change = Callable[[Path], None]


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def config(**entries: object) -> Change:
    def apply(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **entries}))

    return apply


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])


NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"

FAULTS: dict[str, tuple[str, Change, str]] = {
    "unknown": ("llama", tensors(lambda one: one.update({"model.layers.0.lora_A": torch.ones(2)})), "lora_A: no such"),
    "left over": ("llama", config(num_hidden_layers=3), r"model.layers.3.input_layernorm.weight, "),
    "missing": ("llama", tensors(lambda one: one.pop(UP)), f"no tensor {UP}"),
    "misshapen": (
        "llama",
        tensors(lambda one: one.update({NORM: torch.ones(47)})),
        f"{NORM} has shape (47,); needs (48,)",
    ),
    "whole numbers": ("llama", tensors(lambda one: one.update({NORM: one[NORM].int()})), f"{NORM} has dtype I32"),
    "two dtypes": (
        "llama",
        tensors(lambda one: one.update({NORM: one[NORM].bfloat16()})),
        f"model.embed_tokens.weight is float32 and {NORM} is bfloat16; needs one dtype",
    ),
    "truncated": ("llama", cut, "model.safetensors: cannot be read"),
    "architecture": ("llama", config(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel"),
    "feature": ("llama", config(attention_bias=True), "attention_bias = True"),
    "head not tied": (
        "qwen2",
        tensors(lambda one: one.update({"lm_head.weight": one["model.embed_tokens.weight"] + 1})),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_by_name(
    fault: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, change, says = FAULTS[fault]
    shutil.copytree(models / case, tmp_path / "model")
    change(tmp_path / "model")
    for command in ("to-megatron", "to-hf"):
        assert main([command, str(tmp_path / "model"), str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tp", "3"], "tp"),
        (["--pp", "3"], "3 stages do not divide 4 layers"),
        (["--pp", "2", "--layers-per-stage", "1,2"], "the model has 4 layers"),
        (["--vpp", "2"], "parallel.vpp"),
        (["--ep", "2"], "experts"),
    ],
)
def test_a_layout_that_cannot_hold_the_model_is_refused(
    options: list[str], says: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["to-megatron", str(models / "llama"), str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over_what_is_read(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(models / "llama", tmp_path / "models" / "llama")
    for out in (tmp_path / "models", tmp_path / "models" / "llama"):
        assert main(["to-hf", str(tmp_path / "models" / "llama"), str(out), "--overwrite"]) == 2
        assert "is or holds what is read" in capsys.readouterr().err
    assert (tmp_path / "models" / "llama" / "model.safetensors").is_file()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink])
def test_a_damaged_converted_folder_is_refused_by_the_files_name(
    damage: Change, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    assert main(["to-megatron", str(models / "llama"), str(there), "--tp", "2"]) == 0
    damage(there / "release" / "__1_0.distcp")
    assert main(["to-hf", str(there), str(tmp_path / "back")]) == 2
    assert "__1_0.distcp" in capsys.readouterr().err
    assert main(["inspect", str(there)]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said
    assert "__1_0.distcp" in said
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, says in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "config.json: no such file")):
        assert main(["inspect", str(path)]) == 2
        assert says in capsys.readouterr().err
