"""A sample's tokens are a function of the sample alone."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from tests.rollout.tiny import hf_model, make_engine, prompts

SAMPLING = SamplingConfig(temperature=1.1, top_p=0.95, max_new_tokens=24)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def model(request):
    torch.set_num_threads(1)
    return hf_model(request.param)


def responses(rollout):
    return {
        sample: (tokens.tolist(), logprobs)
        for sample, tokens, logprobs in zip(
            rollout.prompts.sample_ids.tolist(),
            rollout.responses.rows(),
            rollout.rollout_logprobs.rows(),
            strict=True,
        )
    }


def test_tokens_do_not_depend_on_neighbours_or_on_how_many_run(model):
    batch = prompts(samples=4)
    eos = (3, 17, 40, 77)  # responses of many lengths, so rows enter and leave all the time
    expected = responses(make_engine(model, max_running=64, eos_token_ids=eos).generate(batch, SAMPLING))
    assert len({len(tokens) for tokens, _ in expected.values()}) > 5
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(batch)

    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    for max_running, kv_cache_tokens, rows in (
        (1, 4096, torch.tensor([3, 9, 18])),
        (3, 4096, order),
        (7, 300, order),
        (64, 700, torch.arange(len(batch))),
    ):
        engine = make_engine(
            model,
            max_running=max_running,
            kv_cache_tokens=kv_cache_tokens,
            eos_token_ids=eos,
        )
        for sample, (tokens, logprobs) in responses(engine.generate(batch.select(rows), SAMPLING)).items():
            assert tokens == expected[sample][0]
            # fp32 rounding; on the machines seen so far they are equal to the bit
            torch.testing.assert_close(logprobs, expected[sample][1], atol=2e-5, rtol=0)


def test_run_seed_sample_id_and_attempt_each_change_the_tokens(model):
    batch = prompts((6,), samples=2)
    first = make_engine(model, run_seed=1).generate(batch, SAMPLING)
    again = make_engine(model, run_seed=1).generate(batch, SAMPLING)
    other_seed = make_engine(model, run_seed=2).generate(batch, SAMPLING)
    other_attempt = make_engine(model, run_seed=1).generate(batch, SAMPLING, attempt=1)
    assert torch.equal(first.responses.values, again.responses.values)
    drawn = [r.tolist() for x in (first, other_seed, other_attempt) for r in x.responses.rows()]
    assert len({tuple(row) for row in drawn}) == 6
