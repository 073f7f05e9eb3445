"""Folders that transformers and safetensors read back, whole or absent."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf.errors import CheckpointError
from rlhf.families.files import HfFolder
from rlhf.families.folder import INDEX_FILE, SINGLE_FILE
from rlhf.families.registry import hf_config, logical_tensors, read_spec
from rlhf.families.spec import Head
from rlhf.families.writer import HfWriter, write_checkpoint
from tests.families.test_registry import spec


def weights(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {t.name: torch.randn(t.shape, generator=generator) for t in logical_tensors(spec(family), head=Head.LM)}


@pytest.mark.parametrize("shard_bytes", [1 << 30, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_was_written(tmp_path, shard_bytes, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in weights("qwen2").items()}
    config = hf_config(spec("qwen2"), dtype=str(dtype).removeprefix("torch."))
    write_checkpoint(tmp_path / "out", tensors, config, shard_bytes=shard_bytes)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (files == [SINGLE_FILE]) == (shard_bytes > 9000)
    assert (len(files) > 3) == (tmp_path / "out" / INDEX_FILE).is_file()
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) for file in files]
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert max(sizes) <= max(shard_bytes, largest)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype is dtype
    theirs = model.state_dict()
    assert theirs.keys() == tensors.keys()
    assert all(torch.equal(theirs[name], tensors[name]) for name in tensors)
    HfFolder(tmp_path / "out").check(logical_tensors(spec("qwen2"), head=Head.LM))
    assert read_spec(tmp_path / "out") == spec("qwen2")


def test_tokenizer_files_and_token_ids_come_from_the_source(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.model",
    ]
    for name in kept:
        (source / name).write_text(name)
    (source / "model.safetensors").write_text("old weights")
    (source / "config.json").write_text(json.dumps({"eos_token_id": [7, 9], "hidden_size": 5, "pad_token_id": 3}))
    write_checkpoint(tmp_path / "out", weights("llama"), hf_config(spec("llama")), source_folder=source)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*kept, "config.json", SINGLE_FILE])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["hidden_size"]) == ([7, 9], 3, 24)
    assert "bos_token_id" not in config


def test_folder_appears_only_when_finished(tmp_path):
    writer = HfWriter(tmp_path / "out", {"a": (3, 5), "b": (2,)}, dtype=torch.float32, shard_bytes=60)
    assert [shard.num_bytes for shard in writer.shards] == [60, 8]
    for _ in range(2):  # the second try starts over
        writer.begin()
        with writer.fill(writer.shards[0]) as pages:
            pages["a"].fill_(2.0)
        assert not (tmp_path / "out").exists()
    with writer.fill(writer.shards[1]) as pages:
        pages["b"].fill_(3.0)
    writer.finish({"model_type": "llama"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert HfFolder(tmp_path / "out").read("b", (slice(0, 2),)).tolist() == [3.0, 3.0]


def test_existing_folder_is_kept_unless_told_otherwise(tmp_path):
    write_checkpoint(tmp_path / "out", weights("llama"), hf_config(spec("llama")))
    with pytest.raises(CheckpointError, match="out: exists"):
        write_checkpoint(tmp_path / "out", weights("qwen3"), hf_config(spec("qwen3")))
    assert read_spec(tmp_path / "out").family == "llama"
    write_checkpoint(tmp_path / "out", weights("qwen3"), hf_config(spec("qwen3")), overwrite=True)
    assert read_spec(tmp_path / "out").family == "qwen3"


def test_a_folder_that_is_replaced_is_never_half_there(tmp_path, monkeypatch):
    """The end comes while the old one is removed, which takes a while where it is large."""

    def cut_short(path, **_):
        files = list(path.glob("*.safetensors")) if path.exists() else []
        if files:
            files[0].unlink()
            raise KeyboardInterrupt

    tensors, config = weights("llama"), hf_config(spec("llama"))
    write_checkpoint(tmp_path / "out", tensors, config)
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path / "out", changed, config, overwrite=True)
    found = load_file(tmp_path / "out" / SINGLE_FILE)
    assert all(torch.equal(found[name], tensor) for name, tensor in changed.items())
    write_checkpoint(tmp_path / "out", tensors, config, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_mixed_dtypes_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="one dtype"):
        write_checkpoint(tmp_path / "out", {"a": torch.ones(2), "b": torch.ones(2).half()}, {})
