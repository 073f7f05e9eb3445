"""Experience of known log-probs and values, against numbers worked out by hand."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from rlhf.algos.running import RunningMoments
from rlhf.config.algorithm import PPOConfig
from rlhf.data.batch import (
    PromptBatch,
    PromptRecord,
    Provenance,
    RewardResult,
    Rollout,
    ScoredRollout,
    ShapedRollout,
    TokenScores,
)
from rlhf.data.ragged import Ragged
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.pool_stats import PoolStats
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.experience import PPOModels, make_experience, sequences_of
from rlhf.trainers.generation import RolloutPart
from rlhf.trainers.shaping import shape_rewards
from rlhf.trainers.step_stats import StepPart, combine, samples_of


@dataclass
class Given:
    """A model that answers with what it was given, or a call that is already collected."""

    scores: Ragged

    def logprobs(self, sequences, *, owners):
        return self

    values = logprobs

    def collect(self):
        return TokenScores(self.scores)


def ragged(*rows, dtype=torch.float32):
    return Ragged.of([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)


def scored(*, valid=(True, True)) -> ScoredRollout:
    """Responses of 2 and 1 tokens; the first row's second token came from a tool."""
    record = PromptRecord("p", "a", {})
    prompts = PromptBatch(
        torch.tensor([4, 5]), torch.tensor([2, 2]), ragged([7, 8], [9], dtype=torch.int64), (record,) * 2
    )
    lengths = torch.tensor([2, 1])
    rollout = Rollout(
        prompts,
        ragged([1, 2], [3], dtype=torch.int64),
        ragged([-1.0, -2.0], [-3.0]),
        torch.tensor([0, 1], dtype=torch.int8),
        Ragged(torch.tensor([Provenance.SAMPLED, Provenance.TOOL, Provenance.SAMPLED], dtype=torch.uint8), lengths),
        Ragged(torch.zeros(3, dtype=torch.int32), lengths),
    )
    results = (RewardResult(1.0), RewardResult(0.5))
    return ScoredRollout(rollout, torch.tensor([1.0, 0.5]), torch.tensor(valid), results)


MODELS = PPOModels(
    actor=Given(ragged([-1.0, -2.0], [-3.0])),
    critic=Given(ragged([0.25, 0.5], [0.125])),
    reference=Given(ragged([-1.5, -2.0], [-2.0])),
)
CONFIG = PPOConfig(gamma=1.0, gae_lambda=1.0, whiten_advantages=False)


def shaped(**kwargs) -> ShapedRollout:
    return shape_rewards(scored(**kwargs), CONFIG, earlier=RunningMoments(), owners_group=None)


def experience(*, kl_coef=0.1, **kwargs):
    return make_experience(shaped(**kwargs), MODELS, CONFIG, kl_coef=kl_coef, owners=(0, 0), owners_group=None)


def test_prompt_and_response_become_one_sequence():
    sequences = sequences_of(scored().rollout)
    assert [row.tolist() for row in sequences.tokens.rows()] == [[7, 8, 1, 2], [9, 3]]
    assert sequences.response_lengths.tolist() == [2, 1]
    assert len(sequences_of(Rollout.empty())) == 0


def test_penalty_on_sampled_tokens_and_score_on_the_last():
    # k1: -1 - -1.5 = 0.5 on row 0's first token, none on the tool's; -3 - -2 = -1 on row 1's only token
    rewards = experience().rewards
    torch.testing.assert_close(rewards.values, torch.tensor([-0.05, 1.0, 0.5 + 0.1]))


def test_returns_are_what_is_still_to_come():
    found = experience()
    torch.testing.assert_close(found.returns.values, torch.tensor([0.95, 1.0, 0.6]))
    torch.testing.assert_close(found.advantages.values, torch.tensor([0.7, 0.5, 0.475]))


def test_tool_tokens_and_invalid_rows_count_in_no_loss():
    assert experience().loss_mask.values.tolist() == [True, False, True]
    assert experience(valid=(True, False)).loss_mask.values.tolist() == [True, False, False]


def test_a_rank_without_rows_gets_an_empty_experience():
    nothing = Given(Ragged.of([], dtype=torch.float32))
    models = PPOModels(actor=nothing, critic=nothing, reference=nothing)
    none = ShapedRollout.empty()
    assert len(make_experience(none, models, CONFIG, kl_coef=0.1, owners=(1, 1), owners_group=None)) == 0


def part_of(found, seconds=2.0) -> StepPart:
    return StepPart(samples_of(found, CONFIG, solved_at=1.0), seconds={"step": seconds, "rollout/generate": 0.5})


def state(policy_version: int = 0) -> DriverState:
    return DriverState(seed=1, kl_coef=0.1, policy_version=policy_version)


def test_metrics_of_a_step():
    metrics = combine({0: part_of(experience())}, state(3))
    assert (metrics.reward.mean, metrics.reward.solved, metrics.reward.max) == (0.75, 0.5, 1.0)
    assert metrics.length.response_mean == 1.5
    assert metrics.length.truncated == 0.5
    assert metrics.kl.ref == pytest.approx((0.5 - 1.0) / 2)  # the tool's token does not count
    assert metrics.kl.coef == 0.1
    assert metrics.kl.penalty == pytest.approx(0.1 * (0.5 - 1.0) / 2)  # two responses
    assert metrics.sync is None
    assert metrics.mismatch is None  # nobody compared
    assert metrics.rate.tokens_per_s == (3 + 3) / 2.0
    assert metrics.value.returns_mean == pytest.approx((0.95 + 0.6) / 2)


def test_the_engines_of_all_leaders_are_told_as_one():
    """Two engines, one busy for 8 of 10 s and one for 4; a third rank leads none."""
    windows = []
    for busy, tokens in ((8.0, 5), (4.0, 9)):
        monitor = PerformanceMonitor(iter((0.0, 10.0)).__next__)
        monitor.submitted([7], at=0.0)
        monitor.begun([7], at=1.0)
        monitor.first_token([7], at=2.0)
        monitor.ended(7, prompt_tokens=4, cached_tokens=1, response_tokens=tokens, at=1.0 + busy)
        windows.append(monitor.window())
    stats = PoolStats(
        engines=2,
        lost_engines=1,
        rows=9,
        mean_response_tokens=4.0,
        queue_time_p50_s=0.5,
        queue_time_p95_s=2.5,
        busy_spread=1.0,
        moved=3,
        padding_waste=0.125,
    )
    rollouts = [RolloutPart(window, stats, 6, 2, tokens=8, stale_tokens=at) for at, window in enumerate(windows)]
    parts = [replace(part_of(experience()), rollout=rollout) for rollout in (*rollouts, None)]
    found = combine(dict(enumerate(parts)), state()).rollout
    assert (found.latency_p50_s, found.queue_p95_s, found.first_token_p50_s) == (7.0, 1.0, 2.0)
    assert found.utilisation == pytest.approx((0.8 + 0.4) / 2)
    assert found.busy_spread == pytest.approx(8 / 6)
    assert found.prefill_tokens_per_s == 3.0 + 3.0
    assert found.decode_tokens_per_s == pytest.approx(4 / 7 + 8 / 3)
    assert found.cache_hits == 0.25
    assert (found.queue_time_p50, found.queue_time_p95, found.padding_waste) == (0.5, 2.5, 0.125)
    assert (found.moved_groups, found.lost_engines, found.left_prompts, found.stale_tokens) == (3, 1, 2, 1 / 16)
    assert combine({0: part_of(experience())}, state()).rollout is None


def test_a_step_without_any_score_has_no_mean_reward():
    reward = combine({0: part_of(experience(valid=(False, False)))}, state()).reward
    assert all(math.isnan(number) for number in (reward.mean, reward.std, reward.min, reward.max))


def test_metrics_do_not_depend_on_which_rank_holds_a_row():
    whole = experience()
    halves = [whole.select(torch.tensor([i])) for i in (0, 1)]
    nobody = whole.select(torch.empty(0, dtype=torch.int64))
    together = combine({0: part_of(whole)}, state()).flatten()
    apart = combine({i: part_of(e) for i, e in enumerate([*halves, nobody])}, state()).flatten()
    assert apart == pytest.approx(together)
