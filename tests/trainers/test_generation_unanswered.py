"""A step that no engine could answer: nothing is kept of responses to prompts that will not be asked again."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from rlhf.data.batch import FinishReason
from rlhf.rollout.answers import Answers, Asked
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.pool import PoolReply
from rlhf.rollout.pool_stats import PoolStats
from rlhf.trainers.generation import Generation
from rlhf.trainers.ownership import Ownership
from tests.rollout.tiny import prompts

ROWS = prompts((3, 4, 5, 6))
"""Prompts 0 to 3: 0 to 2 are asked, 0 and 1 are what the step learns from, 3 waits for a later step."""


class NobodyAnswers:
    def __init__(self):
        self.complete = True

    def ask(self, prompts, sampling, *, keep, begun, takes_part, is_lost):
        self.complete = not is_lost
        assert is_lost or not takes_part
        return PoolReply(kept=(), answers=Answers.empty(), left=(0, 1, 2), begun=begun, stats=STATS)


STATS = PoolStats(
    engines=0,
    lost_engines=0,
    rows=0,
    mean_response_tokens=0.0,
    queue_time_p50_s=0.0,
    queue_time_p95_s=0.0,
    busy_spread=1.0,
    moved=0,
    padding_waste=0.0,
)


STATE = SimpleNamespace(draw=lambda _: SimpleNamespace(asked=(0, 1, 2)), policy_version=1)


def _generation():
    """With responses to prompts 0, 2 and 3 that were begun."""
    config = SimpleNamespace(
        ppo=SimpleNamespace(prompts_per_step=2),
        extra_prompts=1,
        rollout=SimpleNamespace(sampling=None, tail="continue"),
    )
    generation = Generation(
        config,
        rank=0,
        ownership=Ownership((0,)),
        prompts=SimpleNamespace(rows=lambda ids: ROWS.select(torch.tensor(ids))),
        pool=NobodyAnswers(),
        performance=PerformanceMonitor(),
        timers=SimpleNamespace(phase=lambda _: nullcontext()),
    )
    generation._begun = Answers.none_yet(Asked.of(ROWS.select(torch.tensor([0, 2, 3]))))
    return generation


def test_only_what_is_asked_again_is_kept_of_responses_that_were_begun():
    generation = _generation()
    found = generation.step(STATE, left_out=True)
    assert not found.answered
    assert found.left == (2,)
    assert found.rollout.prompts.prompt_ids.tolist() == [0, 1]
    assert set(found.rollout.finish_reasons.tolist()) == {FinishReason.ABORT}
    assert generation._begun.prompt_ids.tolist() == [2, 3]


def test_all_that_was_begun_is_kept_where_engines_were_lost_and_will_be_asked_again():
    generation = _generation()
    assert generation.step(STATE, is_lost=True) is None
    assert generation._begun.prompt_ids.tolist() == [0, 2, 3]
