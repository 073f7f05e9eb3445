"""The same PPO run in different layouts and pools; and the engine's log-probs against the trainer's after updates.

One spawn of 6 ranks does it all, since each rank pays the imports.
"""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build import build_loop
from rlhf.data.batch import Experience, PromptBatch, Rollout
from rlhf.dist.agree import gather, max_of
from rlhf.dist.groups import GroupFactory
from rlhf.trainers.experience import sequences_of
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

ENGINES = ("rollout.tp=2", "rollout.dp=2")
ACTOR = ("actor.parallel.tp=2", "actor.parallel.pp=2", "actor.parallel.layers_per_stage=[2,1]")
CRITIC = ("critic.parallel.tp=4",)
APART = (*ENGINES, *ACTOR, *CRITIC, "reference.parallel.dp=2", "reference.parallel.first_rank=4")
TOGETHER = (*ENGINES, *ACTOR, *CRITIC, "reference.parallel.dp=6")
OTHER = (
    *ENGINES,
    *("actor.parallel.dp=3", "critic.parallel.pp=3", "critic.parallel.first_rank=3"),
    *("reference.parallel.tp=2", "reference.parallel.pp=3"),
)


def _loop(folder: Path, groups: GroupFactory, *overrides: str) -> PPOLoop:
    config = load(folder, *overrides)
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    return loop


def _two_steps(loop: PPOLoop) -> list[Experience]:
    return [loop.step(step)[0] for step in range(2)]


def _same_run(a: list[Experience], b: list[Experience]) -> None:
    """Equal tokens; numbers equal to what fp32 sums in another order leave, after Adam steps that amplify it."""
    for one, two in zip(a, b, strict=True):
        assert torch.equal(one.scored.rollout.responses.values, two.scored.rollout.responses.values)
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
            x, y = getattr(one, name).values, getattr(two, name).values
            torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(
            one.old_logprobs.values, one.scored.rollout.rollout_logprobs.values, atol=1e-4, rtol=0
        )


def _critic_alone(loop: PPOLoop, experience: Experience, folder: Path, groups: GroupFactory) -> None:
    """The critic gives the same values on its own layout beside the actor as in one process alone."""
    alone = _loop(folder, groups, *ENGINES, "name=alone", "actor.parallel.dp=4", "reference.parallel.dp=6")
    owners = loop._owners()
    sequences = sequences_of(experience.scored.rollout)
    values = alone.models.critic.values(sequences, owners=owners).collect().scores
    alone.calls.flush()
    torch.testing.assert_close(values.values, experience.values.values, atol=1e-5, rtol=1e-5)


def _mismatch(loop: PPOLoop, prompts: PromptBatch, group: dist.ProcessGroup) -> float:
    """Largest difference between the engine's log-probs of fresh samples and the trainer's, over all ranks."""
    with loop.phases.rollout():
        rollout = loop._generate(prompts)
    scores = loop.models.actor.logprobs(sequences_of(rollout), owners=loop._owners()).collect().scores
    loop.calls.flush()
    difference = (scores.values - rollout.rollout_logprobs.values).abs()
    return max_of(float(difference.max()) if difference.numel() else 0.0, group)


def _moved(loop: PPOLoop, experience: Experience, group: dist.ProcessGroup) -> float:
    """How far the update moved the log-probs of the responses it learned from, over all ranks."""
    rollout: Rollout = experience.scored.rollout
    now = loop.models.actor.logprobs(sequences_of(rollout), owners=loop._owners()).collect().scores
    loop.calls.flush()
    difference = (now.values - experience.old_logprobs.values).abs()
    return max_of(float(difference.max()) if difference.numel() else 0.0, group)


def _engine_follows_the_trainer(loop: PPOLoop, group: dist.ProcessGroup) -> None:
    """After each of 3 updates that moved log-probs, both sides agree; with one tensor left out they do not."""
    stale: dict[str, torch.Tensor] = {}
    for step in range(2, 5):
        stale = {name: param.clone() for name, param in loop.engine.params().items()} if loop.engine else {}
        experience, _ = loop.step(step)
        assert _moved(loop, experience, group) >= 1e-2
        stats = loop.policy_sync.update_weights(policy_version=step + 1)
        assert stats is None or (stats.moved > 0 and stats.ratio == 1.0)
        prompts = loop._prompts(step + 1)
        assert _mismatch(loop, prompts, group) < 1e-4
    names = sorted({name for held in gather(_tensors(loop), group) for name in held})
    assert len(names) > 30
    unseen = []
    for name in names:
        fresh = _leave_out(loop, name, stale)
        if _mismatch(loop, prompts, group) < 1e-4:
            unseen.append(name)
        for param, values in fresh.items():
            loop.engine.params()[param].copy_(values)
    assert not unseen, f"a sync without these is not noticed: {unseen}"
    assert _mismatch(loop, prompts, group) < 1e-4


def _most_ranks_own_no_row(folder: Path, groups: GroupFactory) -> None:
    """A whole run with more engines and data-parallel ranks than prompts."""
    few = ("ppo.prompts_per_step=2", "ppo.samples_per_prompt=1", "ppo.minibatch_samples=1", "data.held_out=2")
    wide = ("rollout.dp=6", "actor.parallel.dp=4", "critic.parallel.dp=3", "reference.parallel.first_rank=5")
    _loop(folder, groups, *few, *wide, "ppo.epochs=2", "num_steps=1", "name=few").run()
    metrics = folder / "runs" / "few" / "metrics.jsonl"
    if dist.get_rank() == 0:
        last = json.loads(metrics.read_text().splitlines()[-1])
        assert (last["step"], last["held_out/problems"], last["reward/failed"]) == (1, 2, 0)
        assert last["actor/grad_norm"] > 0


def _tensors(loop: PPOLoop) -> list[str]:
    if loop.engine is None:
        return []
    return [held.tensor for held in loop.engine.layout().holdings(dist.get_rank())]


def _leave_out(loop: PPOLoop, tensor: str, stale: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put back what one logical tensor was before the last update; what was there is returned."""
    if loop.engine is None:
        return {}
    fresh, params = {}, loop.engine.params()
    for held in loop.engine.layout().holdings(dist.get_rank()):
        if held.tensor == tensor:
            fresh.setdefault(held.param, params[held.param].clone())
            where = held.param_box(held.box).slices
            params[held.param][where] = stale[held.param][where]
    return fresh


def _all_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=120))
    group = groups.cpu_group([tuple(range(dist.get_world_size()))])
    apart = _loop(folder, groups, *APART, "name=apart")
    steps = _two_steps(apart)
    _same_run(steps, _two_steps(_loop(folder, groups, *TOGETHER, "name=together")))
    _same_run(steps, _two_steps(_loop(folder, groups, *OTHER, "name=other", "actor.microbatch_tokens=40")))
    fresh = _loop(folder, groups, *APART, "name=fresh")
    _critic_alone(fresh, fresh.step(0)[0], folder, groups)
    _engine_follows_the_trainer(apart, group)
    _most_ranks_own_no_row(folder, groups)


@pytest.mark.dist
@pytest.mark.slow
def test_layouts_and_pools_do_not_change_a_run_and_the_engine_follows_the_trainer(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(6, _all_checks, tmp_path)
