"""One step of the loop obeys the state it is given, not what the config started from."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rlhf.algos.kl import kl_estimate
from rlhf.algos.running import RunningMoments
from rlhf.build.loops import build_loop
from rlhf.data.batch import Experience
from rlhf.dist.groups import GroupFactory
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here


def _penalty(experience: Experience) -> float:
    """What the rewards hold beside the scores, over all tokens that count."""
    mask = experience.loss_mask.values
    return float(experience.shaped.rewards[experience.shaped.counts].sum() - experience.rewards.values[mask].sum())


def _kl(experience: Experience) -> float:
    kl = kl_estimate(experience.old_logprobs.values, experience.ref_logprobs.values, estimator="k1")
    return float(kl[experience.loss_mask.values].sum())


def _check_the_state_rules(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    config = load(folder, "ppo.value_loss.clip=relative", "ppo.value_loss.clip_eps=0.5", "ppo.kl_estimator=k1")
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    with loop.reporter, loop.sample_dump:
        state, first, first_part = loop.step(DriverState.start(config))
        assert _penalty(first) == pytest.approx(0.0, abs=1e-5)  # the actor is still the reference
        assert first_part.critic.sums["value_clipped_tokens"] == 0  # no returns yet to measure a clip in

        # 10 returns of standard deviation 1e-6 leave the second minibatch's values no room; of 1e6, all of it.
        narrow = RunningMoments(count=10.0, mean=0.0, squares=1e-11)
        state, second, part = loop.step(replace(state, kl_coef=0.7, returns=narrow))
        assert abs(_kl(second)) > 1e-3
        assert _penalty(second) == pytest.approx(0.7 * _kl(second), rel=1e-3, abs=1e-5)
        assert part.critic.sums["value_clipped_tokens"] > 0

        wide = RunningMoments(count=10.0, mean=0.0, squares=1e13)
        _, third, part = loop.step(replace(state, kl_coef=0.0, returns=wide))
        assert _penalty(third) == pytest.approx(0.0, abs=1e-5)
        assert part.critic.sums["value_clipped_tokens"] == 0


@pytest.mark.dist
def test_a_step_takes_its_kl_weight_and_its_relative_value_clip_from_the_state(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(1, _check_the_state_rules, tmp_path)
