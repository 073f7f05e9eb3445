"""The native engine on one rank against transformers, and its dealings with the caller."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch, Provenance
from rlhf.errors import EngineError
from tests.rollout.tiny import CASES, fill, hf_model, make_engine, prompts, reference_logprobs

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=13)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def greedy_reference(model, prompt, max_new_tokens, eos=None):
    """Response by transformers' generate, up to and with eos."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :]


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_and_logprobs_equal_transformers(name):
    model, batch = hf_model(name), prompts(samples=2)
    rollout = make_engine(model, max_running=5).generate(batch, GREEDY)
    rows = zip(batch.tokens.rows(), rollout.responses.rows(), rollout.rollout_logprobs.rows(), strict=True)
    for prompt, response, logprobs in rows:
        assert response.tolist() == greedy_reference(model, prompt, 13).tolist()
        torch.testing.assert_close(logprobs, reference_logprobs(model, prompt, response), atol=3e-5, rtol=0)
    assert rollout.finish_reasons.tolist() == [FinishReason.LENGTH] * len(batch)


@pytest.mark.parametrize("prompt_tokens", [3, 4, 5, 19, 20, 21])  # a slot is 16 tokens, or 32: one less, full, one more
def test_a_slot_holds_the_longest_row_to_its_last_token(prompt_tokens):
    model, batch = hf_model("llama"), prompts((prompt_tokens, 2))
    rollout = make_engine(model).generate(batch, GREEDY)
    for prompt, response in zip(batch.tokens.rows(), rollout.responses.rows(), strict=True):
        assert response.tolist() == greedy_reference(model, prompt, 13).tolist()


@pytest.mark.parametrize("name", CASES)
def test_sampled_logprobs_are_those_of_the_tempered_distribution(name):
    model, batch = hf_model(name), prompts()
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=11)
    rollout = make_engine(model).generate(batch, sampling)
    rows = zip(batch.tokens.rows(), rollout.responses.rows(), rollout.rollout_logprobs.rows(), strict=True)
    for prompt, response, logprobs in rows:
        torch.testing.assert_close(logprobs, reference_logprobs(model, prompt, response, 0.7), atol=3e-5, rtol=0)


def test_stop_tokens_of_model_and_of_sampling_end_a_response_and_belong_to_it():
    model, batch = hf_model("llama"), prompts()
    free = [greedy_reference(model, prompt, 13).tolist() for prompt in batch.tokens.rows()]
    eos, stop = free[0][4], free[2][7]
    engine = make_engine(model, eos_token_ids=(eos,))
    rollout = engine.generate(batch, SamplingConfig(temperature=0.0, max_new_tokens=13, stop_token_ids=(stop,)))
    for row, response, reason in zip(free, rollout.responses.rows(), rollout.finish_reasons.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in (eos, stop)]
        assert response.tolist() == (row[: ends[0] + 1] if ends else row)
        assert reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert FinishReason.STOP in rollout.finish_reasons


def test_ignore_eos_lets_no_token_end_a_response():
    model, batch = hf_model("llama"), prompts()
    free = [greedy_reference(model, prompt, 13).tolist() for prompt in batch.tokens.rows()]
    engine = make_engine(model, eos_token_ids=tuple({row[4] for row in free}))
    rollout = engine.generate(batch, SamplingConfig(temperature=0.0, max_new_tokens=13, ignore_eos=True))
    assert [response.tolist() for response in rollout.responses.rows()] == free
    assert rollout.finish_reasons.tolist() == [FinishReason.LENGTH] * len(batch)


def test_rollout_says_where_tokens_came_from_and_which_weights_made_them():
    engine = make_engine(hf_model("qwen3"))
    engine.weights_updated(7)
    rollout = engine.generate(prompts(), GREEDY)
    assert rollout.provenance.values.eq(Provenance.SAMPLED).all()
    assert rollout.policy_versions.values.eq(7).all()
    assert rollout.policy_versions.values.numel() == rollout.responses.values.numel() == 13 * len(rollout)


def test_new_weights_are_used_at_once():
    model = hf_model("qwen2")
    engine, batch = make_engine(model), prompts((5, 6))
    before = engine.generate(batch, GREEDY)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    fill(engine.params(), engine.layout(), 0, model.state_dict())
    engine.weights_updated(1)
    after = engine.generate(batch, GREEDY)
    assert not torch.equal(before.responses.values, after.responses.values)
    rows = zip(batch.tokens.rows(), after.responses.rows(), after.rollout_logprobs.rows(), strict=True)
    for prompt, response, logprobs in rows:
        torch.testing.assert_close(logprobs, reference_logprobs(model, prompt, response), atol=3e-5, rtol=0)


def test_weights_that_are_not_numbers_are_reported_with_the_sample():
    engine = make_engine(hf_model("llama"))
    engine.params()["layers.1.down.weight"][3, 5] = float("nan")
    engine.weights_updated(4)
    with pytest.raises(EngineError, match=r"sample 1000 .* policy version 4"):
        engine.generate(prompts(), GREEDY)


def test_submissions_come_back_together_in_their_order():
    model, batch = hf_model("llama"), prompts()
    engine = make_engine(model)
    alone = engine.generate(batch, GREEDY)
    parts = batch.split([2, 1, 3])
    short = SamplingConfig(temperature=0.0, max_new_tokens=2)
    for part, sampling in zip(parts, (GREEDY, short, GREEDY), strict=True):
        engine.submit(part, sampling)
    joined = engine.collect()
    assert joined.prompts.sample_ids.tolist() == batch.sample_ids.tolist()
    assert joined.responses.lengths.tolist() == [13, 13, 2, 13, 13, 13]
    for i in (0, 1, 3, 4, 5):
        assert joined.responses.rows()[i].tolist() == alone.responses.rows()[i].tolist()
    with pytest.raises(EngineError, match="submit"):
        engine.collect()


def test_no_rows_give_no_rows():
    empty = prompts().select(torch.arange(0))
    rollout = make_engine(hf_model("llama")).generate(empty, GREEDY)
    assert len(rollout) == 0
    assert rollout.responses.values.dtype == torch.int64


def test_prompt_beyond_the_cache_and_empty_prompt_are_refused_by_sample():
    engine = make_engine(hf_model("llama"), kv_cache_tokens=64, sampling=GREEDY)
    with pytest.raises(EngineError, match="sample 1000 needs 52 prompt tokens"):
        engine.generate(prompts((52,)), GREEDY)
    with pytest.raises(EngineError, match="sample 1001 has an empty prompt"):
        engine.generate(prompts((3, 0)), GREEDY)
    assert engine.generate(prompts((51,)), GREEDY).responses.lengths.tolist() == [13]


@pytest.mark.parametrize("token", [131, 190, 5000, -1])  # 131..191 are padding rows of the embedding
def test_a_token_outside_the_vocabulary_is_refused_by_sample(token):
    engine, batch = make_engine(hf_model("llama")), prompts((3, 4))
    batch.tokens.values[5] = token
    with pytest.raises(EngineError, match=rf"sample 1001 has prompt token {token}; the model has 0\.\.130"):
        engine.submit(batch, GREEDY)
    assert len(engine.generate(prompts((3,)), GREEDY)) == 1  # nothing was queued


def test_asleep_engine_refuses_and_wakes_with_the_same_answers():
    engine, batch = make_engine(hf_model("qwen3")), prompts()
    before = engine.generate(batch, GREEDY)
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.generate(batch, GREEDY)
    engine.wake()
    (after,) = [engine.collect()]
    assert torch.equal(before.responses.values, after.responses.values)
    engine.close()


def test_progress_rises_to_the_number_of_rows():
    seen = []
    engine = make_engine(hf_model("llama"), max_running=2, on_progress=lambda done, total: seen.append((done, total)))
    engine.generate(prompts(), GREEDY)
    assert {total for _, total in seen} == {6}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (6, 6)
    assert len(seen) == 3 * 13 + 1  # three waves of two rows; a report before each step, and at the end


def test_prompt_batch_type_is_kept():
    rollout = make_engine(hf_model("llama")).generate(prompts(), GREEDY)
    assert isinstance(rollout.prompts, PromptBatch)
