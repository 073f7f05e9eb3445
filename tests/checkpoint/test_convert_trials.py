"""--dry-run foretells what a conversion writes; --dummy converts through files and leaves nothing; weights are made."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.made import MadeWeights, made_weights
from rlhf.checkpoint.convert.sources import Wanted
from rlhf.errors import CheckpointError
from rlhf.families.registry import hf_config, logical_tensors
from rlhf.families.spec import Head
from rlhf.reshard.layout import Box
from tests.families.test_registry import spec
from tests.mcore.tiny import make_checkpoint

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for case in ("llama", "qwen3_moe"):
        make_checkpoint(case, root / case)
        (root / f"{case}.bare").mkdir()  # no weights
        shutil.copyfile(root / case / "config.json", root / f"{case}.bare" / "config.json")
    return root


def report_of(folder: Path, *argv: object) -> dict:
    report = folder / "report.json"
    assert main([*map(str, argv), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    report.unlink()
    return found


@pytest.mark.parametrize(
    ("case", "argv", "slack"),
    [
        ("llama", ["to-megatron", "--tp", 2, "--pp", 2, "--vpp", 2], 0),
        ("qwen3_moe", ["to-megatron", "--tp", 2, "--ep", 4], 0),
        ("qwen3_moe", ["to-megatron", "--tp", 2, "--ep", 2, "--format", "legacy"], 100_000),
        ("llama", ["to-hf", "--shard-size", "100KB"], 10_000),
    ],
)
def test_the_files_are_those_that_are_written_then(models, tmp_path, case, argv, slack) -> None:
    command, *others = argv
    plan = report_of(tmp_path, command, models / f"{case}.bare", tmp_path / "there", *others, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    done = report_of(tmp_path, command, models / case, tmp_path / "there", *others)
    weights = load_file(models / case / "model.safetensors").values()
    assert plan["num_bytes"] == sum(weight.numel() * weight.element_size() for weight in weights)
    assert len(plan["files"]) == done["num_files"]
    for name, size in plan["files"].items():
        assert 0 <= (tmp_path / "there" / name).stat().st_size - size <= slack, name


def test_sizes_of_the_largest_models_need_no_weights(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, 10**12))
    argv = ["to-megatron", "llama3-405b", tmp_path / "out", "--tp", 8, "--pp", 16, "--processes", 32, "--dry-run"]
    layers = ["--layers-per-stage", ",".join(["7", *["8"] * 14, "7"])]
    plan = report_of(tmp_path, *argv, *layers)
    assert (plan["num_parameters"], plan["num_bytes"]) == (405_853_388_800, 811_706_777_600)
    assert len(plan["files"]) == 128
    # 8 layers of 405B over 8 ranks: a layer is 4 matrices of attention (K and V of 8 heads), 3 of the MLP and 2 norms
    of_layer = (2 * 16384**2 + 2 * 8 * 128 * 16384 + 3 * 16384 * 53248) // 8 + 2 * 16384
    assert plan["rank_bytes"] == 2 * max(8 * of_layer, 7 * of_layer + 128256 // 8 * 16384 + 16384)
    assert plan["share_bytes"] < 1.05 * plan["num_bytes"] / 32
    assert plan["fits"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, 10**11))
    assert not report_of(tmp_path, *argv, *layers)["fits"]
    assert "NOT ENOUGH" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["to-megatron", "--tp", 2, "--pp", 2],
        ["to-megatron", "--tp", 2, "--ep", 2, "--format", "legacy"],
        ["to-hf", "--shard-size", "300KB"],
    ],
)
def test_a_rehearsal_proves_its_bits_and_leaves_nothing(models, tmp_path, argv) -> None:
    command, *others = argv
    case = "qwen3_moe" if "legacy" in others else "llama"
    found = report_of(tmp_path, command, models / f"{case}.bare", tmp_path / "out", *others, "--dummy")
    assert list(tmp_path.iterdir()) == []
    assert found["same"]
    assert found["against_copy"] > 0
    assert found["copied_bytes"] >= found["made"]["num_bytes"] > 0
    assert found["converted"]["peak_bytes"] > 2**20


def test_a_rehearsal_without_room_writes_nothing(models, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**13, 0, 2**30))
    assert main(["to-megatron", str(models / "llama.bare"), str(tmp_path / "out"), "--dummy"]) == 2
    assert "1,073,741,824 bytes free; needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_names_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"llama9-1b: neither a folder with config.json nor a published model"):
        made_weights(Path("llama9-1b"), dtype="")


@pytest.fixture
def made(tmp_path) -> MadeWeights:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec("qwen3_moe"))))
    return made_weights(tmp_path, dtype="bfloat16")


def whole(made: MadeWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    made.read([Wanted(name, Box(tuple((0, extent) for extent in shape)), found)])
    return found


def test_a_block_is_made_as_it_lies_in_the_whole_tensor_and_no_two_are_alike(made) -> None:
    tensors = logical_tensors(made.spec, head=Head.LM)
    assert made.dtypes == dict.fromkeys((tensor.name for tensor in tensors), torch.bfloat16)
    rows = set()
    for tensor in tensors:
        found = whole(made, tensor.name, tensor.shape)
        assert torch.isfinite(found).all()
        rows |= {tuple(row) for row in found.view(-1, tensor.shape[-1]).tolist()}
        spans = tuple((extent // 3, extent - extent // 4) for extent in tensor.shape)
        block = torch.zeros([stop - start for start, stop in spans], dtype=torch.float32)
        made.read([Wanted(tensor.name, Box(spans), block)])
        assert torch.equal(block.bfloat16(), found[Box(spans).slices]), tensor.name
    assert len(rows) == sum(tensor.shape[0] if len(tensor.shape) > 1 else 1 for tensor in tensors)


def test_rows_beyond_a_turn_of_the_table_differ_too() -> None:
    made = made_weights(Path("smollm2-135m"), dtype="")
    name, shape = "model.embed_tokens.weight", (49152, 576)
    found = whole(made, name, shape)
    assert len(torch.unique(found[:, :8].float(), dim=0)) > 49_100  # of bfloat16 numbers some eight may coincide
    part = torch.zeros(3, 5, dtype=torch.bfloat16)
    made.read([Wanted(name, Box.of((1023, 1026), (570, 575)), part)])
    assert torch.equal(part, found[1023:1026, 570:575])
