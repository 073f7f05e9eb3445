"""Slices against whole tensors that safetensors itself wrote; damaged folders."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rlhf.errors import CheckpointError
from rlhf.families.files import HfFolder
from rlhf.families.folder import INDEX_FILE, SINGLE_FILE, resolve_folder
from rlhf.families.spec import LogicalTensor, Part


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(11, generator=generator),
        "c": torch.randn(3, 4, generator=generator).bfloat16(),
    }


@pytest.fixture(params=["single", "sharded"])
def folder(request, tmp_path):
    if request.param == "single":
        save_file(tensors(), tmp_path / SINGLE_FILE)
    else:
        save_file({"a": tensors()["a"]}, tmp_path / "model-1.safetensors")
        save_file({"b": tensors()["b"], "c": tensors()["c"]}, tmp_path / "model-2.safetensors")
        index = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return tmp_path


def test_slices_equal_the_whole(folder):
    files, whole = HfFolder(folder), tensors()
    assert files.names() == set(whole)
    assert files.shape("a") == (7, 5)
    assert files.dtype("c") is torch.bfloat16
    assert torch.equal(files.read("a", (slice(2, 5), slice(1, 5))), whole["a"][2:5, 1:5])
    assert torch.equal(files.read("b", (slice(4, 11),)), whole["b"][4:])
    assert torch.equal(files.read("c", (slice(0, 3), slice(0, 4))), whole["c"])


def test_blocks_go_into_any_memory_of_any_dtype(folder):
    files, whole = HfFolder(folder), tensors()
    into = torch.zeros(5, 8, dtype=torch.bfloat16)
    files.read_into("a", (slice(3, 7), slice(1, 4)), into.t()[2:6, 1:4])
    expected = torch.zeros(8, 5)
    expected[2:6, 1:4] = whole["a"][3:7, 1:4]
    assert torch.equal(into, expected.t().bfloat16())
    straight = torch.zeros(9, 5)
    files.read_into("a", (slice(2, 7), slice(0, 5)), straight[1:6])
    assert torch.equal(straight[1:6], whole["a"][2:7])
    assert not straight[[0, 6, 7, 8]].any()


def test_a_file_that_shrinks_under_a_reader_is_named(tmp_path):
    save_file({"a": tensors()["a"]}, tmp_path / SINGLE_FILE)
    files, content = HfFolder(tmp_path), (tmp_path / SINGLE_FILE).read_bytes()
    files.read("a", (slice(0, 7), slice(0, 5)))
    (tmp_path / "cut").write_bytes(content[:-8])
    (tmp_path / "cut").replace(tmp_path / SINGLE_FILE)
    end = len(content) - 8
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: ends at byte {end}; needs the whole file"):
        files.read("a", (slice(0, 7), slice(0, 5)))


def test_missing_tensor_and_wrong_shape_are_named(folder):
    files = HfFolder(folder)
    with pytest.raises(CheckpointError, match="no tensor lost"):
        files.read("lost", (slice(0, 1),))
    with pytest.raises(CheckpointError, match=r"safetensors: a has shape \(7, 5\)"):
        files.read("a", (slice(0, 8), slice(0, 5)))
    with pytest.raises(CheckpointError, match=r"b has shape \(11,\); needs \(12,\)"):
        files.check([LogicalTensor("b", (12,), Part.FINAL_NORM)])
    files.check([LogicalTensor("a", (7, 5), Part.EMBED), LogicalTensor("b", (11,), Part.FINAL_NORM)])


def test_an_integer_tensor_is_refused_and_not_cast(tmp_path):
    save_file({"a": torch.ones(7, 5, dtype=torch.int8)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"a has dtype I8; needs one of .*use an unquantised checkpoint"):
        HfFolder(tmp_path).check([LogicalTensor("a", (7, 5), Part.EMBED)])


def test_truncated_file_is_named(tmp_path):
    save_file(tensors(), tmp_path / SINGLE_FILE)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for kept in (len(whole) - 8, 20, 0):
        (tmp_path / SINGLE_FILE).write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=SINGLE_FILE):
            HfFolder(tmp_path)


def test_index_that_does_not_match_its_files_is_named(tmp_path):
    save_file({"a": tensors()["a"]}, tmp_path / "one.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors: no tensor b"):
        HfFolder(tmp_path).shape("b")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"two\.safetensors.*for b"):
        HfFolder(tmp_path)


def test_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="safe_serialization"):
        HfFolder(tmp_path)


def test_path_is_a_folder_or_a_cached_hub_id(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path
    for wrong in ("nobody/no-such-model-here", str(tmp_path / "nowhere"), "a b"):
        with pytest.raises(CheckpointError, match=r"neither a folder nor a hub id.*`hf download`"):
            resolve_folder(wrong)


def test_who_has_not_run_the_quickstart_is_told_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"run \./scripts/quickstart\.sh, which makes it"):
        resolve_folder(".cache/quickstart/sft")
