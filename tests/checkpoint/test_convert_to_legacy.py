"""Legacy folders that we write: cut as Megatron-LM cuts, read by torch alone, and the same model on the way back."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.checkpoint.convert.command import main
from rlhf.families.registry import read_spec
from tests.checkpoint.megatron_lm import layer_of_rank
from tests.mcore.tiny import make_checkpoint

FILE = "model_optim_rng.pt"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for case in ("llama", "qwen2", "qwen3_moe"):
        make_checkpoint(case, root / case)
        (root / case / "tokenizer.json").write_text(json.dumps({"of": case}))
    return root


def convert(*argv: object) -> None:
    assert main([str(arg) for arg in argv]) == 0


def same_weights(first: Path, second: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("case", "layout", "names"),
    [
        ("llama", ["--tp", 2, "--pp", 2, "--vpp", 2], "te"),
        ("qwen2", ["--tp", 4, "--pp", 2, "--layers-per-stage", "1,3"], "local"),
        ("qwen3_moe", ["--tp", 2, "--ep", 4, "--etp", 1], "te"),
        ("qwen3_moe", ["--tp", 2, "--pp", 2, "--layers-per-stage", "1,3", "--ep", 2, "--etp", 2], "local"),
    ],
)
def test_there_and_back_is_the_same_model_to_the_bit(models, tmp_path, capsys, case, layout, names) -> None:
    source, there = models / case, tmp_path / "there"
    convert("to-megatron", source, there, "--format", "legacy", "--names", names, *layout)
    convert("to-hf", there, tmp_path / "back")
    assert same_weights(source, tmp_path / "back")
    assert read_spec(tmp_path / "back") == read_spec(source)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    convert("to-megatron", there, tmp_path / "dist", "--tp", 2)
    convert("inspect", there)
    convert("verify", there, tmp_path / "dist", "--no-logits")
    told = capsys.readouterr().out
    assert "the same model" in told
    assert "Megatron-LM legacy checkpoint, step 0" in told


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_files_hold_what_megatron_lm_would_have_cut_and_no_class_but_its_args(models, tmp_path, case) -> None:
    there, spec, weights = tmp_path / "there", read_spec(models / case), load_file(models / case / "model.safetensors")
    convert("to-megatron", models / case, there, "--format", "legacy", "--tp", 2, "--pp", 2)
    assert (there / "latest_checkpointed_iteration.txt").read_text() == "release"
    for stage in (0, 1):
        for rank in (0, 1):
            path = there / "release" / f"mp_rank_{rank:02d}_{stage:03d}" / FILE
            with torch.serialization.safe_globals([argparse.Namespace]):
                found = torch.load(path, weights_only=True)
            expected = {}
            for layer in (0, 1):
                of_layer = layer_of_rank(spec, weights, 2 * stage + layer, tp=2, rank=rank)
                expected |= {f"decoder.layers.{layer}.{name}": weight for name, weight in of_layer.items()}
            table = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(1, spec.hidden_size)]).chunk(2)[rank]
            if stage == 0:
                expected["embedding.word_embeddings.weight"] = table
            else:
                head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
                expected["output_layer.weight"] = torch.cat([head, torch.zeros(1, spec.hidden_size)]).chunk(2)[rank]
                expected["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
            assert found["model"].keys() == expected.keys()
            assert all(torch.equal(found["model"][name], weight) for name, weight in expected.items())
            assert (found["checkpoint_version"], found["iteration"]) == (3.0, 0)
            args = found["args"]
            assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
            assert (args.transformer_impl, args.ckpt_format, args.padded_vocab_size) == (
                "transformer_engine",
                "torch",
                132,
            )


def test_a_layout_that_the_format_has_no_room_for_is_refused_and_leaves_nothing(models, tmp_path, capsys) -> None:
    argv = ["to-megatron", models / "qwen3_moe", tmp_path / "there", "--format", "legacy", "--ep", 2, "--etp", 2]
    assert main([str(arg) for arg in argv]) == 2
    assert "has mp_rank_00_000 for both; needs etp of at most tp" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(models, tmp_path, capsys, monkeypatch) -> None:
    def full(handle: int, part: memoryview, start: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert main(["to-megatron", str(models / "llama"), str(tmp_path / "there"), "--format", "legacy"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
