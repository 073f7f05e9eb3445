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


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


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
    "no list": ("llama", config(architectures=3), "architectures is 3; needs a list"),
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
    for command in ("to-hf", "to-megatron"):
        for out in (tmp_path / "models", tmp_path / "models" / "llama"):
            assert main([command, str(tmp_path / "models" / "llama"), str(out), "--overwrite"]) == 2
            assert "is or holds what is read" in capsys.readouterr().err
    assert (tmp_path / "models" / "llama" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["to-hf", "to-megatron"])
def test_a_file_or_a_link_is_not_taken_for_a_folder_to_replace(
    command: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("of someone")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, what in (("file", "a file"), ("link", "a link"), ("dangling", "a link")):
        assert main([command, str(models / "llama"), str(tmp_path / name), "--overwrite"]) == 2
        assert f"{name}: is {what}" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "of someone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "folder", "link"]


def test_what_an_index_leaves_out_is_refused_and_a_needless_buffer_is_listed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["to-hf", str(models / "llama"), str(tmp_path / "model"), "--shard-size", "100KB"]) == 0
    first, second = sorted((tmp_path / "model").glob("*.safetensors"))[:2]
    there = load_file(second)
    for name in ("model.layers.9.mlp.up_proj.weight", "model.embed_tokens.weight"):  # none's, and the first file's
        save_file({**there, name: torch.ones(2)}, second, metadata={"format": "pt"})
        capsys.readouterr()
        for command in (["to-megatron"], ["verify", "--no-logits", str(models / "llama")]):
            assert main([*command, str(tmp_path / "model"), *([str(tmp_path / "out")] * (len(command) == 1))]) == 2
            assert f"{second.name}: holds {name}, which" in capsys.readouterr().err
    save_file({**there, "model.rotary_emb.inv_freq": torch.ones(8)}, second, metadata={"format": "pt"})
    assert main(["to-megatron", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    assert "dropped: model.rotary_emb.inv_freq" in capsys.readouterr().out
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: 3 for name in load_file(first)}}))
    assert main(["inspect", str(tmp_path / "model")]) == 1
    assert "DAMAGED" in (said := capsys.readouterr().out)
    assert "its weight_map names no files" in said


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
    for command in (["to-hf", str(there), str(tmp_path / "back")], ["verify", str(models / "llama"), str(there)]):
        assert main(command) == 2
        assert "__1_0.distcp" in capsys.readouterr().err
    assert main(["inspect", str(there)]) == 1
    said = capsys.readouterr().out
    assert "DAMAGED" in said
    assert "__1_0.distcp" in said
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def scramble(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95" + b"\x7f" * 60)


LEGACY = "release/mp_rank_01/model_optim_rng.pt"


@pytest.mark.parametrize(
    ("argv", "name", "damages"),
    [
        (["to-hf", "--shard-size", "100KB"], "model-00002-of-00005.safetensors", (cut_file, scramble, Path.unlink)),
        (["to-hf"], "config.json", (cut_file, scramble)),
        (["to-megatron", "--tp", "2"], "release/.metadata", (cut_file, scramble)),
        (["to-megatron", "--tp", "2"], "release/__1_0.distcp", (cut_file, Path.unlink)),
        (["to-megatron", "--tp", "2", "--format", "legacy"], LEGACY, (cut_file, scramble, Path.unlink)),
    ],
)
def test_inspect_calls_damaged_what_cannot_be_read(
    argv: list[str], name: str, damages: tuple[Change, ...], models: Path, tmp_path: Path, capsys
) -> None:
    """Without a manifest too: what Hugging Face and Megatron-LM write has none."""
    command, *options = argv
    there = tmp_path / "there"
    assert main([command, str(models / "llama"), str(there), *options]) == 0
    assert (there / name).is_file()
    (there / "manifest.json").unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["inspect", str(there)]) == 0
    assert "UNKNOWN" in capsys.readouterr().out
    whole = (there / name).read_bytes()
    for damage in damages:
        damage(there / name)
        assert main(["inspect", str(there), "--json", str(tmp_path / "report.json")]) == 1
        said = capsys.readouterr().out
        assert "DAMAGED" in said
        assert Path(name).name in said
        assert json.loads((tmp_path / "report.json").read_text())["checksum"]["state"] == "damaged"
        (there / name).write_bytes(whole)


def test_inspect_finds_damage_by_the_manifest_where_the_rest_says_nothing(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    assert main(["to-megatron", str(models / "llama"), str(there)]) == 0
    (there / "release" / ".metadata").unlink()  # by which the format is known
    (there / "config.json").unlink()
    capsys.readouterr()
    assert main(["inspect", str(there)]) == 1
    assert "DAMAGED: " in capsys.readouterr().out


def test_what_tells_nothing_of_its_damage_is_an_error_and_no_crash(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No manifest, and files that torch's and pickle's readers fail on in ways of their own."""
    there = tmp_path / "there"
    assert main(["to-megatron", str(models / "llama"), str(there), "--tp", "2"]) == 0
    (there / "manifest.json").unlink()
    metadata, common, data = (there / "release" / name for name in (".metadata", "common.pt", "__0_0.distcp"))
    whole = metadata.read_bytes()
    for damaged, says in (
        (b"\x80\x04\x95" + b"\x7f" * 8, "cannot be read"),  # a frame longer than memory
        (whole.replace(b"relative_path", b"relativf_path"), "lies nowhere"),
    ):
        metadata.write_bytes(damaged)
        assert main(["verify", str(models / "llama"), str(there), "--no-logits"]) == 2
        assert says in capsys.readouterr().err
    metadata.write_bytes(whole)
    written = common.read_bytes()
    for damaged in (b"", written.replace(b"norm_epsilon", b"norm_\xffpsilon")):  # its model is told by config.json
        common.write_bytes(damaged)
        assert main(["inspect", str(there)]) == 0
    capsys.readouterr()
    data.write_bytes(b"")
    assert main(["verify", str(models / "llama"), str(there), "--no-logits"]) == 2
    assert "__0_0.distcp: no tensor at byte 0" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, says in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "config.json: no such file")):
        assert main(["inspect", str(path)]) == 2
        assert says in capsys.readouterr().err
