"""From scores to rewards: the order of the rules, and independence of who owns which row."""

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlhf.algos.running import RunningMoments
from rlhf.config.algorithm import LengthPenaltyConfig, PPOConfig, RewardShapingConfig
from rlhf.data.batch import FinishReason, PromptBatch, PromptRecord, RewardResult, Rollout, ScoredRollout, ShapedRollout
from rlhf.data.ragged import Ragged
from rlhf.dist.groups import GroupFactory
from rlhf.trainers.shaping import shape_rewards
from tests.harness.ranks import run_ranks

NOTHING = RunningMoments()


def scored(scores: list[float], *, lengths: list[int], cut: tuple[int, ...] = (), dropped: tuple[int, ...] = ()):
    """Two samples a prompt; rows `cut` were truncated, the reward of rows `dropped` failed."""
    n = len(scores)
    finish = [FinishReason.LENGTH if i in cut else FinishReason.STOP for i in range(n)]

    def tokens(dtype: torch.dtype) -> Ragged:
        return Ragged(torch.zeros(sum(lengths), dtype=dtype), torch.tensor(lengths))

    prompts = PromptBatch(
        torch.arange(n),
        torch.arange(n) // 2,
        Ragged(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)),
        (PromptRecord("p", "a", {}),) * n,
    )
    rollout = Rollout(
        prompts,
        tokens(torch.int64),
        tokens(torch.float32),
        torch.tensor(finish, dtype=torch.int8),
        tokens(torch.uint8),
        tokens(torch.int32),
    )
    valid = torch.tensor([i not in dropped for i in range(n)])
    return ScoredRollout(rollout, torch.tensor(scores), valid, tuple(RewardResult(s) for s in scores))


def config(length: dict | None = None, **shaping) -> PPOConfig:
    return PPOConfig(
        samples_per_prompt=2,
        shaping=RewardShapingConfig(**shaping),
        length_penalty=LengthPenaltyConfig(**(length or {})),
    )


def shape(rows: ScoredRollout, settings: PPOConfig) -> ShapedRollout:
    return shape_rewards(rows, settings, earlier=NOTHING, owners_group=None)


def test_by_default_the_reward_is_the_score_to_the_bit():
    rows = scored([0.1, -0.7, 3.0], lengths=[0, 1, 9], cut=(2,), dropped=(0,))
    found = shape(rows, config())
    assert torch.equal(found.rewards, rows.scores)
    assert torch.equal(found.counts, rows.valid)


def test_length_penalties_are_added_to_the_score():
    rows = scored([1.0] * 5, lengths=[1, 2, 6, 7, 9])
    found = shape(rows, config({"min_tokens": 2, "short_penalty": 0.5, "max_tokens": 8, "cache_tokens": 2}))
    assert found.rewards.tolist() == [0.5, 1.0, 1.0, 0.5, 0.0]
    assert torch.equal(found.scored.scores, torch.ones(5))  # what the reward function said stays


def test_a_truncated_response_gets_its_score_before_penalties_and_clip():
    rows = scored([5.0, 5.0], lengths=[4, 4], cut=(1,))
    settings = {"max_tokens": 4, "cache_tokens": 1, "long_penalty": 0.25}
    assert shape(rows, config(settings, truncated="score", truncated_score=-1.0)).rewards.tolist() == [4.75, -1.25]
    clipped = shape(rows, config(settings, truncated="score", truncated_score=-1.0, clip=(-1.0, 2.0)))
    assert clipped.rewards.tolist() == [2.0, -1.0]


def test_masked_truncated_responses_take_part_in_no_loss_and_no_statistic():
    rows = scored([1.0, 3.0, 9.0, 4.0], lengths=[2] * 4, cut=(2,))
    found = shape(rows, config(truncated="mask", normalize="group"))
    assert found.counts.tolist() == [True, True, False, True]
    torch.testing.assert_close(found.rewards, torch.tensor([-1.0, 1.0, 0.0, 0.0]))  # the last is alone in its group


SCORES = np.random.default_rng(4).normal(3.0, 2.0, (2, 12)).astype(np.float32)
EARLIER = SCORES[0]
DROPPED, CUT = (1, 7), (4,)
KEPT = np.array([i not in DROPPED + CUT for i in range(12)])


def _rows(index: list[int]) -> ScoredRollout:
    whole = scored(SCORES[1].tolist(), lengths=[3] * 12, cut=CUT, dropped=DROPPED)
    return whole.select(torch.tensor(index, dtype=torch.int64))


def _owned_by(owners: int, groups: GroupFactory, settings: PPOConfig) -> torch.Tensor:
    """Rewards of the rows of this rank, whose place says which; prompt p belongs to owner p % owners."""
    group, rank = groups.cpu_group([tuple(range(owners))]), dist.get_rank()
    index = [i for i in range(12) if i // 2 % owners == rank] if rank < owners else []
    earlier = RunningMoments.of(torch.tensor(EARLIER))
    found = shape_rewards(_rows(index), settings, earlier=earlier, owners_group=group)
    rewards = torch.zeros(12).index_add_(0, torch.tensor(index, dtype=torch.int64), found.rewards)
    dist.all_reduce(rewards)
    return rewards


def _check_ownership() -> None:
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    kept = SCORES[1][KEPT].astype(np.float64)
    run = np.concatenate([EARLIER, kept])
    pairs = SCORES[1].astype(np.float64).reshape(6, 2)
    apart = (pairs - pairs.mean(1, keepdims=True)) / pairs.std(1, keepdims=True)
    whole = np.repeat(KEPT.reshape(6, 2).all(1), 2)  # a pair of which one was left out gives 0
    expected = {
        "batch": (kept - kept.mean()) / kept.std(),
        "running": (kept - run.mean()) / run.std(),
        "group": np.where(whole, apart.reshape(12), 0.0)[KEPT],
    }
    for normalize, reference in expected.items():
        for owners in (1, 2, 3):
            found = _owned_by(owners, groups, config(normalize=normalize, truncated="mask")).numpy()[KEPT]
            # float32 leaves 1e-7; the 1e-8 added to the variance of the closest pair, 2e-4, leaves half of 5e-5
            np.testing.assert_allclose(found, reference, atol=5e-5, err_msg=f"{normalize}, {owners} owners")


@pytest.mark.dist
def test_normalised_rewards_are_numpys_whoever_owns_the_rows():
    run_ranks(3, _check_ownership)
