"""An engine of several ranks answers like an engine of one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.config.rollout import SamplingConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineError
from tests.harness.ranks import run_ranks
from tests.rollout.tiny import CASES, hf_model, make_engine, prompts

SAMPLED = SamplingConfig(temperature=0.9, top_k=60, max_new_tokens=7)
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=7)
EOS = (3, 17, 40)


def check_against_one_rank() -> None:
    """tp 2 twice (two engines at a time) and tp 4 (KV heads replicated), against tp 1 on each rank."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    sets = {2: [(0, 1), (2, 3)], 4: [(0, 1, 2, 3)]}
    groups = {tp: (factory.device_group(ranks), factory.cpu_group(ranks)) for tp, ranks in sets.items()}
    for name in CASES:
        model, batch = hf_model(name), prompts((9, 1, 23, 4))
        alone = make_engine(model, eos_token_ids=EOS)
        for tp, samplings in ((2, (SAMPLED, GREEDY)), (4, (SAMPLED,))):
            leads = rank % tp == 0
            engine = make_engine(
                model, rank=rank, groups=groups[tp], tp=tp, dp=4 // tp, max_running=3, eos_token_ids=EOS
            )
            for sampling in samplings:
                found = engine.generate(batch if leads else None, sampling)
                assert (found is not None) == leads
                if leads:
                    wanted = alone.generate(batch, sampling)
                    assert found.responses.values.tolist() == wanted.responses.values.tolist()
                    assert torch.equal(found.finish_reasons, wanted.finish_reasons)
                    gap = (found.rollout_logprobs.values - wanted.rollout_logprobs.values).abs().max()
                    assert gap < 3e-5, gap  # fp32 sums in another order
        with pytest.raises(EngineError, match="empty prompt"):
            engine.submit(prompts((2, 0)) if leads else None, GREEDY)
        none = engine.generate(batch.select(torch.arange(0)) if leads else None, GREEDY)
        assert not leads or len(none) == 0


@pytest.mark.dist
def test_engines_of_two_and_four_ranks_answer_like_one():
    run_ranks(4, check_against_one_rank)
