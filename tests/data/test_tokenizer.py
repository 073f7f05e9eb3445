import json
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlhf.data.ragged import Ragged
from rlhf.data.tokenizer import EOS, check_vocabulary, decode_responses, eos_token_ids, load_tokenizer, tiny_tokenizer
from rlhf.errors import CheckpointError

CORPUS = [f"What is {i} plus {3 * i}?" for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder, CORPUS, vocab_size=290)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral"])
def test_the_class_is_the_one_transformers_chooses(folder, tmp_path, kind):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    chosen = AutoTokenizer.from_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(chosen)
    assert found.get_vocab() == chosen.get_vocab()
    assert found(CORPUS[7]).input_ids == chosen(CORPUS[7]).input_ids


def test_a_plain_tokenizer_costs_no_import_of_every_model(folder):
    code = "import sys; from rlhf.data.tokenizer import load_tokenizer; from pathlib import Path;"
    code += "load_tokenizer(Path(sys.argv[1])); print('transformers.models.auto.modeling_auto' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_bytes_alone_cost_one_token_each(tmp_path):
    plain = tiny_tokenizer(tmp_path)
    assert len(plain) == 258
    assert len(plain("What is 27?").input_ids) == 11


def test_a_corpus_joins_phrases_but_never_digits(tokenizer):
    pieces = [tokenizer.decode([token]) for token in tokenizer("What is 190 plus 57?").input_ids]
    assert pieces == ["What is ", "1", "9", "0", " plus ", "5", "7", "?"]
    assert len(tokenizer) <= 290


def test_decode_leaves_out_the_end_token(tokenizer):
    rows = [[*tokenizer("12 é").input_ids, tokenizer.eos_token_id], [], [tokenizer.eos_token_id]]
    responses = Ragged.of([torch.tensor(row, dtype=torch.int64) for row in rows], dtype=torch.int64)
    assert decode_responses(tokenizer, responses) == ["12 é", "", ""]
    assert tokenizer.eos_token == EOS


def test_end_tokens_come_from_all_three_places_once(folder, tokenizer, tmp_path):
    assert eos_token_ids(tokenizer, folder) == (tokenizer.eos_token_id,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, tokenizer.eos_token_id]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert eos_token_ids(tokenizer, tmp_path) == (tokenizer.eos_token_id, 7, 9)


def test_a_model_without_an_end_token_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.eos_token = None
    with pytest.raises(CheckpointError, match="could never end"):
        eos_token_ids(tokenizer, tmp_path)


def test_an_empty_tokenizer_that_transformers_made_up_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"no tokenizer could be read .* needs tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_model_must_have_a_row_for_every_token(tokenizer):
    size = len(tokenizer)
    check_vocabulary(tokenizer, (tokenizer.eos_token_id,), {"actor": size, "critic": size + 64})
    with pytest.raises(CheckpointError, match=rf"critic\.model\.path: .* vocab_size = {size - 1}.* up to {size - 1}"):
        check_vocabulary(tokenizer, (tokenizer.eos_token_id,), {"actor": size, "critic": size - 1})
    with pytest.raises(CheckpointError, match=f"up to {size + 3}"):
        check_vocabulary(tokenizer, (size + 3,), {"actor": size})


def test_a_folder_without_tokenizer_is_refused_without_asking_the_network(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer could be read .* needs tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_no_responses_are_no_texts(tokenizer):
    assert decode_responses(tokenizer, Ragged.of([], dtype=torch.int64)) == []
