"""Which token a string ends a response at."""

import pickle

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason
from rlhf.data.tokenizer import TextOf, tiny_tokenizer
from rlhf.errors import EngineError
from rlhf.rollout.stopping import StopStrings
from tests.rollout.tiny import hf_model, make_engine, prompts

TEXT = "Ω=2; so the answer is  42.\n\nNext: 日本語 <|end|> é."


@pytest.fixture(scope="module", params=[258, 300])
def tokenizer(request, tmp_path_factory):
    """Bytes alone, so that letters take several tokens; and merges, so that a token ends a string in its middle."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return tiny_tokenizer(folder, [TEXT] * 3, vocab_size=request.param), folder


@pytest.mark.parametrize(
    "stop", ["\n\n", "answer is  4", "2", " ", "Ω", "日本", "本語 ", "é", "<|end|>", "not in there", TEXT]
)
def test_a_response_ends_with_the_token_that_completes_a_string(tokenizer, stop):
    made, folder = tokenizer
    tokens = made.encode(TEXT)
    strings = StopStrings((stop, "neither is this"), TextOf(folder))
    found = [strings.ended(tokens[:count]) for count in range(1, len(tokens) + 1)]
    wanted = [stop in made.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    if True not in wanted:
        assert True not in found
        return
    first = wanted.index(True)
    assert found[: first + 1] == [False] * first + [True]
    assert strings.ended(tokens[max(0, first + 1 - strings.span) : first + 1])  # the last `span` tokens are enough


def test_text_is_read_anew_in_another_process(tokenizer):
    made, folder = tokenizer
    text_of = TextOf(folder)
    assert text_of(made.encode("a<|end|>")) == "a<|end|>"
    packed = pickle.dumps(text_of)
    assert len(packed) < 500
    assert pickle.loads(packed)(made.encode("as it was")) == "as it was"


def letters(tokens):
    """Each token is a letter."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_embedded_engine_ends_rows_by_strings_and_by_nothing_else(temperature):
    model, batch = hf_model("qwen2"), prompts(samples=4)
    free = SamplingConfig(temperature=temperature, max_new_tokens=30, ignore_eos=True)
    whole = make_engine(model).generate(batch, free)
    stop = (letters(whole.responses.rows()[2][6:9].tolist()), letters(whole.responses.rows()[5][3:4].tolist()))
    ended = make_engine(model, decode=letters, max_running=5).generate(
        batch, SamplingConfig(temperature=temperature, max_new_tokens=30, stop=stop)
    )
    for row, found, reason in zip(
        whole.responses.rows(), ended.responses.rows(), ended.finish_reasons.tolist(), strict=True
    ):
        text = letters(row.tolist())
        ends = [text.find(one) + len(one) for one in stop if one in text]
        assert found.tolist() == row[: min(ends, default=30)].tolist()
        assert reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert torch.unique(ended.finish_reasons).numel() > 1


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(EngineError, match=r"sampling\.stop = \['x'\], but the engine was made without a tokenizer"):
        make_engine(hf_model("llama")).generate(prompts(), SamplingConfig(stop=("x",)))
