"""Checkpoints that to-megatron did not write: training runs of ours, and folders of Megatron-LM."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.megatron_args import megatron_args, read_args, spec_of_args
from rlhf.checkpoint.store.data_file import WrittenFile
from rlhf.checkpoint.store.torch_dist import data_file_name, write_metadata
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import CheckpointError
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import build_model
from rlhf.mcore.model_state import model_blocks
from rlhf.mcore.state_record import model_record
from rlhf.reshard.block import Block
from rlhf.reshard.layout import Box
from tests.checkpoint.megatron_by_hand import stored_by_hand
from tests.checkpoint.stored_blocks import write_file
from tests.checkpoint.test_convert import assert_same_bits, tensors_of
from tests.mcore.fake_ranks import as_rank
from tests.mcore.tiny import COMMON


def save_roles(models: Path, folder: Path) -> None:
    """Actor (llama) on two tp ranks, critic (reward) on one, as a run would save them."""
    folder.mkdir(parents=True)
    (folder / "roles").mkdir()
    files: list[WrittenFile] = []
    for role, case, head, parallel in (
        ("actor", "llama", Head.LM, ParallelConfig(tp=2)),
        ("critic", "reward", Head.VALUE, ParallelConfig()),
    ):
        for rank in parallel.ranks:
            with as_rank(parallel, rank) as groups:
                spec, cpu = read_spec(models / case), torch.device("cpu")
                config = ModelConfig(path=str(models / case))
                model = build_model(spec, config, parallel, groups, head=head, device=cpu, seed=1, trainable=False)
                load_weights(model, models / case)
                blocks = model_blocks(model, prefix=role, own_share=True)
                moments = [replace(one, key=f"{role}.optimizer.state.exp_avg.{one.key}") for one in blocks]
                files.append(write_file(folder / data_file_name(len(files)), [*blocks, *moments]))
                (folder / "roles" / f"{role}.json").write_text(json.dumps(model_record(model, None)))
    write_metadata(folder, files, common={"iteration": 7})
    run = {role: {"model": {"path": str(models / case)}} for role, case in (("actor", "llama"), ("critic", "reward"))}
    (folder / "config.yaml").write_text(json.dumps(run))
    (folder.parent / "latest").write_text(f"{folder.name}\n")


def test_each_role_of_a_training_checkpoint_becomes_a_folder(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_00000007"
    save_roles(models, step)
    for role, case, given in (("actor", "llama", step), ("critic", "reward", tmp_path / "run")):
        out = tmp_path / role
        assert main(["to-hf", str(given), str(out), "--role", role]) == 0
        assert_same_bits(tensors_of(out), tensors_of(models / case))
        assert main(["verify", str(models / case), str(out), "--no-logits"]) == 0
    assert "state of training, no weight" in capsys.readouterr().out
    for options, says in (([], "models: actor, critic"), (["--role", "judge"], "no model 'judge'")):
        assert main(["to-hf", str(step), str(tmp_path / "none"), *options]) == 2
        assert says in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "run"), "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(one["role"], one["head"], one["layout"]["tp"]) for one in report["models"]] == [
        ("actor", "lm", 2),
        ("critic", "value", 1),
    ]
    assert report["checksum"]["state"] == "unknown"  # saved by hand, without a manifest


def test_a_damaged_text_of_a_training_checkpoint_is_named(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_00000007"
    save_roles(models, step)
    record = step / "roles" / "actor.json"
    told = json.loads(record.read_text())

    def model(**others: object) -> bytes:
        return json.dumps({**told, "model": {**told["model"], **others}}).encode()

    for path, content, says in (
        (record, model(head="what"), "'what' is not a valid Head"),
        (record, model(head=None), "None is not a valid Head"),
        (record, model(num_layers="4"), "num_layers is '4'; needs int"),
        (record, model(tied_embeddings=0), "tied_embeddings is 0; needs bool"),
        (record, model(norm_eps=True), "norm_eps is True; needs float"),
        (record, model(family=None), "family is None; needs str"),
        (record, model(rope_scaling={"x": 1}), "unexpected keyword argument 'x'"),
        (step / "config.yaml", b"a: [", "no YAML"),
        (step / "config.yaml", b"\xff\xfe", "no YAML"),
        (step.parent / "latest", b"\xff\xfe\x00", "no checkpoint"),
    ):
        whole = path.read_bytes()
        path.write_bytes(content)
        assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--role", "actor"]) == 2
        said = capsys.readouterr().err
        assert str(path) in said
        assert says in said
        path.write_bytes(whole)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "needs a number of steps, or release" in capsys.readouterr().err


def whole(key: str, tensor: Tensor) -> Block:
    shape = tuple(tensor.shape)
    return Block(key, shape, Box(tuple((0, extent) for extent in shape)), tensor)


def save_as_megatron_lm(models: Path, folder: Path, case: str, *, more: str = "", **changes: object) -> ModelSpec:
    """An iteration of a training run by Megatron-LM: padded vocabulary, optimizer, arguments, nothing of ours."""
    spec = read_spec(models / case)
    inner = folder / "iter_0000120"
    inner.mkdir(parents=True)
    stored = stored_by_hand(
        tensors_of(models / case),
        layers=spec.num_layers,
        heads=COMMON["num_attention_heads"],
        kv_heads=COMMON["num_key_value_heads"],
    )
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        stored[key] = torch.cat([stored[key], torch.full((256 - 131, 48), 9.0)])
    stored["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(48)
    if more:
        stored[more] = torch.zeros(48)
    written = write_file(inner / data_file_name(0), [whole(key, tensor) for key, tensor in stored.items()])
    args = megatron_args(spec, ParallelConfig(tp=2), dtype=torch.float32, ckpt_format="torch_dist")
    args = argparse.Namespace(**{**args, **changes})
    write_metadata(inner, [written], common={"args": args, "iteration": 120, "checkpoint_version": 3.0})
    (folder / "latest_checkpointed_iteration.txt").write_text("120")
    return spec


def test_megatron_lms_folder_is_read_by_its_arguments(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_as_megatron_lm(models, tmp_path / "theirs", "mixtral")
    report = tmp_path / "report.json"
    assert main(["to-hf", str(tmp_path / "theirs"), str(tmp_path / "out"), "--json", str(report)]) == 0
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(models / "mixtral"))
    found = json.loads(report.read_text())
    padded = {"tensor": "lm_head.weight", "why": "256 rows are stored, 131 are the vocabulary's"}
    assert padded in found["padded"]
    assert [one["tensor"] for one in found["dropped"]] == ["optimizer.state.exp_avg.decoder.final_layernorm.weight"]
    assert main(["verify", str(models / "mixtral"), str(tmp_path / "theirs")]) == 0
    assert main(["inspect", str(tmp_path / "theirs" / "iter_0000120")]) == 0
    assert "step 120" in capsys.readouterr().out


def test_a_stored_tensor_that_no_model_has_or_with_too_few_rows_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "decoder.layers.mlp.adapter.weight"
    save_as_megatron_lm(models, tmp_path / "more", "llama", more=unknown)
    save_as_megatron_lm(models, tmp_path / "few", "llama", vocab_size=257)  # 256 rows are stored
    needed = "embedding.word_embeddings.weight has shape [256, 48]; needs [257, 48]"
    for name, says in (("more", f"{unknown}: no such tensor"), ("few", needed)):
        assert main(["to-hf", str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "more"]


def test_a_model_that_its_arguments_do_not_tell_is_taken_from_where_it_is_said(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_as_megatron_lm(models, tmp_path / "theirs", "llama", vocab_size=None)
    assert main(["to-hf", str(tmp_path / "theirs"), str(tmp_path / "out")]) == 2
    assert "no vocab_size in Megatron-LM's args" in capsys.readouterr().err
    given = ["--config-from", str(models / "llama")]
    assert main(["to-hf", str(tmp_path / "theirs"), str(tmp_path / "out"), *given]) == 0
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(models / "llama"))
    assert (
        main(["to-hf", str(tmp_path / "theirs"), str(tmp_path / "never"), "--config-from", str(models / "deep")]) == 2
    )
    assert "decoder.layers.self_attention.linear_qkv" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "mistral", "deep", "qwen3_moe", "qwen3_moe_raw", "mixtral"])
def test_arguments_tell_the_model_they_were_made_of(case: str, models: Path, tmp_path: Path) -> None:
    spec = read_spec(models / case)
    args = megatron_args(spec, ParallelConfig(tp=2, pp=2), dtype=torch.bfloat16, ckpt_format="torch_dist")
    args["attention_backend"] = AttnBackend.auto  # as there always is
    torch.save({"args": argparse.Namespace(**args)}, tmp_path / "common.pt")
    assert spec_of_args(read_args(tmp_path / "common.pt"), where="common.pt") == spec
    with pytest.raises(CheckpointError, match="normalization = 'LayerNorm'"):
        spec_of_args({**args, "normalization": "LayerNorm"}, where="common.pt")
    with pytest.raises(CheckpointError, match=r"window_size \(7, 7\)"):
        spec_of_args({**args, "window_size": (7, 7)}, where="common.pt")
    if case != "mistral":
        with pytest.raises(CheckpointError, match=rf"window_size \(7, 0\) for a {spec.family}"):
            spec_of_args({**args, "window_size": (7, 0)}, where="common.pt")


class Foreign:
    """A class of another program."""


def test_arguments_with_classes_of_other_programs_are_not_unpickled(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(num_layers=3, backend=Foreign())}, tmp_path / "common.pt")
    assert read_args(tmp_path / "common.pt") == {}
