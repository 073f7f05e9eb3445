"""What verify finds: equal models, one bit, a changed number of the config, logits of another model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.to_hf import model_config
from rlhf.checkpoint.verify import logits
from rlhf.checkpoint.verify.logits import parity

NAME = "model.layers.2.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def there(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted folders of some cases."""
    root = tmp_path_factory.mktemp("there")
    for case, axis in (("llama", "--tp"), ("qwen2", "--pp"), ("mixtral", "--ep"), ("reward", "--tp")):
        assert main(["to-megatron", str(models / case), str(root / case), axis, "2"]) == 0
    return root


def verify(tmp_path: Path, *arguments: object) -> tuple[int, dict]:
    code = main(["verify", *(str(one) for one in arguments), "--json", str(tmp_path / "report.json")])
    return code, json.loads((tmp_path / "report.json").read_text())


def changed(source: Path, folder: Path, change=lambda tensors: None, **config: object) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **config}))
    return folder


@pytest.mark.parametrize("case", ["llama", "qwen2", "mixtral"])
def test_a_converted_model_is_the_same_and_says_the_same(case: str, models: Path, there: Path, tmp_path: Path) -> None:
    code, report = verify(tmp_path, models / case, there / case)
    assert (code, report["same"]) == (0, True)
    assert report["tensors"]["num_tensors"] == len(load_file(models / case / "model.safetensors"))
    assert report["logits"]["num_tokens"] == 40
    assert report["logits"]["largest_difference"] <= 1e-5 * report["logits"]["largest_logit"]
    names = {row["name"] for row in report["config"]}
    assert {"norm_eps", "head_dim", "tied_embeddings", "rope_scaling", f"norm_eps (args of {there / case})"} <= names
    tied = [{"tensor": "lm_head.weight", "why": "is model.embed_tokens.weight"}] if case == "qwen2" else []
    assert report["b"]["tied"] == tied


def test_one_bit_is_found_and_named(
    models: Path, there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip(tensors: dict[str, Tensor]) -> None:
        tensors[NAME].view(torch.int32)[7, 5] ^= 1

    other = changed(models / "llama", tmp_path / "other", flip)
    for first in (models / "llama", there / "llama"):
        code, report = verify(tmp_path, first, other, "--no-logits")
        assert (code, report["same"]) == (1, False)
        (found,) = report["tensors"]["differences"]
        assert found["tensor"] == NAME
        assert found["what"].startswith("1 element differs, the first at [7, 5]")
    assert "NOT THE SAME" in capsys.readouterr().out


def test_zeros_of_other_signs_and_other_dtypes_are_differences(models: Path, tmp_path: Path) -> None:
    def zero(tensors: dict[str, Tensor], sign: float) -> None:
        tensors[NAME][3, 4] = sign * 0.0

    plus, minus = (
        changed(models / "llama", tmp_path / name, lambda one, sign=sign: zero(one, sign))
        for name, sign in (("plus", 1.0), ("minus", -1.0))
    )
    code, report = verify(tmp_path, plus, minus, "--no-logits")
    assert (code, len(report["tensors"]["differences"])) == (1, 1)

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: one.bfloat16() for name, one in tensors.items()})

    short = changed(models / "llama", tmp_path / "short", halve)
    code, report = verify(tmp_path, models / "llama", short, "--no-logits")
    assert (code, len(report["tensors"]["differences"])) == (1, 39)
    assert report["tensors"]["differences"][0]["what"] == "float32 against bfloat16"
    code, report = verify(tmp_path, models / "llama", short, "--dtype", "bfloat16")
    assert (code, report["logits"]["same"]) == (0, True)  # logits too are those of the cast weights


def test_other_numbers_of_the_config_are_found_and_heard(models: Path, tmp_path: Path) -> None:
    """Tensors are equal: what is read wrongly from a config shows in the logits alone."""
    for number, (key, value, field) in enumerate(
        [
            ("rms_norm_eps", 3e-2, "norm_eps"),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 731.0}, "rope_scaling"),
        ]
    ):
        other = changed(models / "llama", tmp_path / f"other{number}", **{key: value})
        code, report = verify(tmp_path, models / "llama", other)
        assert (code, report["tensors"]["differences"]) == (1, [])
        assert [row["name"] for row in report["config"] if not row["same"]] == [field]
        assert not report["logits"]["same"]


def test_logits_alone_can_tell_models_apart(
    models: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tensors and configs; two orders of summation in float32 are what differs."""
    monkeypatch.setattr(logits, "TOLERANCE", 0.0)
    code, report = verify(tmp_path, models / "llama", there / "llama")
    assert (code, report["same"], report["tensors"]["differences"]) == (1, False, [])
    assert all(row["same"] for row in report["config"])
    assert 0 < report["logits"]["largest_difference"] < 1e-5 * report["logits"]["largest_logit"]


def test_a_missing_or_other_tokenizer_is_a_difference(models: Path, tmp_path: Path) -> None:
    one, two = (changed(models / "llama", tmp_path / name) for name in ("one", "two"))
    (one / "tokenizer_config.json").write_text("{}")
    code, report = verify(tmp_path, one, two, "--no-logits")
    assert (code, [row["name"] for row in report["config"] if not row["same"]]) == (1, ["tokenizer_config.json"])


def test_other_special_tokens_and_another_generation_config_are_differences(models: Path, tmp_path: Path) -> None:
    one = changed(models / "llama", tmp_path / "one", eos_token_id=[7, 9], bos_token_id=1, pad_token_id=3)
    assert main(["to-megatron", str(one), str(tmp_path / "there")]) == 0
    assert verify(tmp_path, one, tmp_path / "there", "--no-logits")[0] == 0
    for key, value in (("bos_token_id", 2), ("eos_token_id", 7), ("pad_token_id", None)):
        other = changed(one, tmp_path / key, **{key: value})
        code, report = verify(tmp_path, tmp_path / "there", other, "--no-logits")
        assert (code, [row["name"] for row in report["config"] if not row["same"]]) == (1, [key])
    (one / "generation_config.json").write_text('{"eos_token_id": 8}')
    code, report = verify(tmp_path, one, tmp_path / "there", "--no-logits")
    assert (code, [row["name"] for row in report["config"] if not row["same"]]) == (1, ["generation_config.json"])


def test_a_model_with_another_head_than_its_folder_keeps_the_special_tokens(models: Path, tmp_path: Path) -> None:
    """As a critic that was trained from a language model's folder."""
    source = changed(models / "llama", tmp_path / "source", eos_token_id=[7, 9], bos_token_id=1)
    weights = HfWeights(models / "reward")
    weights.hf_files = source
    made = model_config(weights, torch.float32)
    assert made["architectures"] == ["LlamaForSequenceClassification"]
    assert (made["eos_token_id"], made["bos_token_id"]) == ([7, 9], 1)
    assert made["pad_token_id"] is None  # as the folder says


def test_a_value_head_is_compared_and_has_no_logits(models: Path, there: Path, tmp_path: Path) -> None:
    code, report = verify(tmp_path, models / "reward", there / "reward")
    assert (code, report["logits"], report["no_logits"]) == (0, None, "the model has a value head")
    code, report = verify(tmp_path, models / "llama", there / "reward")
    assert code == 1
    assert {one["tensor"] for one in report["tensors"]["differences"]} >= {"score.weight", "lm_head.weight"}


def test_tensors_of_other_models_are_named_with_both_shapes(models: Path, tmp_path: Path) -> None:
    code, report = verify(tmp_path, models / "qwen2", models / "deep")
    assert (code, report["no_logits"]) == (1, "the tensors do not match")
    found = {one["tensor"]: one["what"] for one in report["tensors"]["differences"]}
    assert found["lm_head.weight"] == "no such tensor against shape [131, 48]"


def test_parity_is_relative_to_the_largest_logit() -> None:
    near, far = torch.tensor([[3.0, -40.0], [1.0, 2.0]]), torch.tensor([[3.0, -40.0], [1.0, 2.0 + 0.0041]])
    assert parity([near], [near + 0.0039]).is_same
    assert not parity([near], [far]).is_same
    nan = near + float("nan")
    for expected, found in (([near], [nan]), ([near, near], [near, nan]), ([near, near], [nan, near])):
        assert not parity(expected, found).is_same
    assert not parity([nan, near], [nan, near]).is_same  # nothing is proved by it
