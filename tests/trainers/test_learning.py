"""PPO learns a toy task in a job where every role has another layout; with shuffled rewards it learns nothing."""

import json
import random
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.config.data import RewardConfig
from rlhf.config.run import PPORunConfig
from rlhf.dist.groups import GroupFactory
from rlhf.reward.function import RewardFunction
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.evaluation import Evaluation
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

STEPS = 20
HELD_OUT = 200
SETTINGS = (
    "actor.parallel.tp=2",
    "actor.parallel.pp=2",
    "actor.parallel.layers_per_stage=[2,1]",
    "critic.parallel.tp=4",
    "reference.parallel.dp=4",
    "rollout.tp=2",
    "rollout.dp=2",
    "rollout.max_running=64",
    "rollout.kv_cache_tokens=2048",
    "rollout.sampling.max_new_tokens=1",
    "eval.sampling.max_new_tokens=1",
    "eval.sampling.temperature=1",  # judged by the distribution that is trained
    f"data.held_out={HELD_OUT}",
    "ppo.prompts_per_step=128",
    "ppo.samples_per_prompt=1",
    "ppo.minibatch_samples=64",
    "ppo.epochs=2",
    "ppo.kl_coef=0",
    "ppo.entropy_coef=0",
    "ppo.gae_lambda=1",
    "actor.optim.lr=6e-3",
    "critic.optim.lr=6e-3",
    "actor.microbatch_tokens=600",
    "critic.microbatch_tokens=600",
    "reference.microbatch_tokens=600",
)


def make_prompts(folder: Path) -> None:
    """Rows of letters and a digit, in rows.jsonl."""
    draw = random.Random(7)
    rows = {}
    while len(rows) < 2000:
        digit = draw.randrange(10)
        rows["".join(draw.choices("abcdefgh", k=3)) + str(digit)] = str(digit)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows.items()]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def solved_before_and_after(folder: Path, groups: GroupFactory, reward: str, *settings: str) -> tuple[float, float]:
    """Share of held-out problems that the model solves before and after training on a reward, on each rank."""
    config = load(folder, *SETTINGS, f"name={reward}", f"reward.function=tests.trainers.rewards:{reward}", *settings)
    loop = build_loop(config, ranks_here(folder / "runs" / reward, groups))
    assert isinstance(loop, PPOLoop)
    with closing(loop.engine) if loop.engine else nullcontext():
        return _train(loop, config)


def _train(loop: PPOLoop, config: PPORunConfig) -> tuple[float, float]:
    evaluation = _honest(loop.evaluation)
    shares, state = [], DriverState.start(config)
    for step in range(STEPS + 1):
        if step in (0, STEPS):
            with loop.phases.rollout():
                loop.policy_sync.update_weights(policy_version=step)
                result = evaluation.judge(step, evaluation.ask())
            assert result.problems == HELD_OUT
            shares.append(result.solved)
        if step < STEPS:
            state, _, _ = loop.step(state)
    return shares[0], shares[1]


def _honest(evaluation: Evaluation) -> Evaluation:
    """The same evaluation by the true reward, whatever reward the run trains on."""
    if evaluation.scorer is None:
        return evaluation
    true = RewardFunction(RewardConfig(function="tests.trainers.rewards:same_parity"))
    return replace(evaluation, scorer=replace(evaluation.scorer, function=true))


def check_learned(before: float, after: float) -> None:
    """More than 15 points, and more than chance gives."""
    error = ((before * (1 - before) + after * (1 - after)) / HELD_OUT) ** 0.5
    if dist.get_rank() == 0:
        print(f"true rewards: {before:.3f} -> {after:.3f} (standard error {error:.3f})")
    assert after - before >= max(0.15, 2 * error), f"{before} -> {after}"


def _check(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=120))
    check_learned(*solved_before_and_after(folder, groups, "same_parity"))
    before, after = solved_before_and_after(folder, groups, "same_parity_shuffled")
    if dist.get_rank() == 0:
        print(f"shuffled rewards: {before:.3f} -> {after:.3f}")
    assert after - before < 0.15, f"rewards tied to nothing taught something: {before} -> {after}"


@pytest.mark.dist
@pytest.mark.slow
def test_ppo_learns_a_toy_task_and_learns_nothing_from_shuffled_rewards(tmp_path: Path) -> None:
    make_files(tmp_path)
    make_prompts(tmp_path)
    run_ranks(4, _check, tmp_path)
