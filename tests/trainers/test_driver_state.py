"""What a resume needs: how it moves from step to step, and that nothing of it is lost on the way to a file and back."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from rlhf.algos.running import RunningMoments
from rlhf.config.algorithm import KLControllerConfig, PPOConfig, RewardShapingConfig, ValueLossConfig
from rlhf.errors import CheckpointError
from rlhf.trainers.driver_state import DriverState, StepTally

START = DriverState(seed=7, kl_coef=0.1)
STATE = replace(
    START,
    step=3,
    prompts_taken=24,
    begun_prompts=(19, 22),
    policy_version=2,
    kl_coef=0.1 / 3,
    rewards=RunningMoments.of(torch.tensor([0.1, 0.7, 1e-3])),
    returns=RunningMoments.of(torch.randn(50, generator=torch.Generator().manual_seed(1))),
)


def tally(rewards=(), returns=(), kl=()) -> StepTally:
    return StepTally(*(RunningMoments.of(torch.tensor(values)) for values in (rewards, returns, kl)))


def tally_of(left) -> StepTally:
    return replace(tally(), left=left)


def test_counters_move_by_the_size_of_a_step_and_the_version_with_training():
    config = PPOConfig(prompts_per_step=8, samples_per_prompt=4, minibatch_samples=16, critic_warmup_steps=2)
    states = [START]
    for _ in range(4):
        states.append(states[-1].after([], config))
    assert [state.step for state in states] == [0, 1, 2, 3, 4]
    assert [state.prompts_taken for state in states] == [0, 8, 16, 24, 32]
    assert [state.responses for state in states] == [0, 32, 64, 96, 128]
    assert [state.policy_version for state in states] == [0, 0, 0, 1, 2]


def test_a_step_asks_begun_prompts_first_and_takes_no_more_new_ones_than_it_needs():
    config = PPOConfig(prompts_per_step=4, minibatch_samples=4)
    first = START.draw(6)
    assert (first.asked, first.waiting, first.prompts_taken) == ((0, 1, 2, 3, 4, 5), (), 6)
    then = START.after([StepTally(*[RunningMoments()] * 3), tally_of(left=(1, 4))], config, extra_prompts=2)
    assert (then.prompts_taken, then.begun_prompts) == (6, (1, 4))
    assert then.draw(6).asked == (1, 4, 6, 7, 8, 9)
    assert then.after([tally_of(left=())], config, extra_prompts=2).prompts_taken == 10
    assert then.after([], config, extra_prompts=2).begun_prompts == ()  # what is left over is dropped


def test_begun_prompts_are_not_lost_when_fewer_are_asked_after_a_resume():
    state = replace(START, prompts_taken=9, begun_prompts=(2, 5, 7, 8))
    draw = state.draw(3)
    assert (draw.asked, draw.waiting, draw.prompts_taken) == ((2, 5, 7), (8,), 9)
    config = PPOConfig(prompts_per_step=3, minibatch_samples=3)
    assert state.after([], config).begun_prompts == (8,)
    assert state.after([], config).draw(3).asked == (8, 9, 10)


def test_nothing_else_moves_unless_the_config_asks_for_it():
    found = START.after([tally([1.0], [2.0], [9.0])], PPOConfig())
    assert (found.kl_coef, found.rewards, found.returns) == (START.kl_coef, START.rewards, START.returns)


def test_the_controller_sees_the_mean_over_the_responses_of_all_ranks():
    config = PPOConfig(minibatch_samples=1, kl_controller=KLControllerConfig(kind="adaptive", target=2.0, horizon=100))
    # Mean 2.2 of four responses: 10 % above the target, 4 of 100 responses.
    found = START.after([tally(kl=[1.0]), tally(), tally(kl=[3.0, 3.0, 1.8])], config)
    assert found.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 4 / 100), rel=1e-6)
    assert START.after([tally(), tally(kl=[float("nan")])], config).kl_coef == START.kl_coef


def test_the_coefficient_stays_while_the_critic_alone_is_trained():
    adaptive = KLControllerConfig(kind="adaptive", target=2.0, horizon=100)
    config = PPOConfig(prompts_per_step=4, minibatch_samples=1, critic_warmup_steps=1, kl_controller=adaptive)
    first = START.after([tally(kl=[0.0] * 4)], config)
    assert first.kl_coef == START.kl_coef
    assert first.after([tally(kl=[0.0] * 4)], config).kl_coef < START.kl_coef


def test_moments_of_a_run_are_those_of_all_its_steps():
    config = PPOConfig(shaping=RewardShapingConfig(normalize="running"), value_loss=ValueLossConfig(clip="relative"))
    state = START.after([tally([1.0], [5.0]), tally([2.0, 6.0])], config).after([tally([3.0], [7.0])], config)
    assert (state.rewards.count, state.rewards.mean, state.rewards.variance) == (4, 3.0, 3.5)
    assert (state.returns.count, state.returns.mean, state.returns.variance) == (2, 6.0, 1.0)


def test_a_state_survives_json_to_the_bit():
    assert DriverState.from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kl_coef": float("nan")}, "kl_coef is nan"),
        ({"rewards": {"count": 1.0, "mean": 0.0}}, "driver state: rewards: holds"),
        ({"returns": 3.0}, "driver state: returns: holds 3.0"),
        ({"step": {}}, "step is"),
        ({"steps": 1}, "driver state: holds"),
        ({"begun_prompts": [3, "4"]}, r"begun_prompts is \[3, '4'\]"),
        ({"begun_prompts": 3}, "begun_prompts is 3"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        DriverState.from_dict(STATE.to_dict() | change)


def test_no_step_changes_the_state_it_was_given():
    before = START.to_dict()
    START.after([tally([1.0], [1.0], [1.0])], PPOConfig(shaping=RewardShapingConfig(normalize="running")))
    assert START.to_dict() == before
    with pytest.raises(FrozenInstanceError):
        START.step = 1
