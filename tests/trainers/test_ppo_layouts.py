"""The same PPO run in different layouts and pools; and the engine's log-probs against the trainer's after updates.

One spawn of 6 ranks does it all, since each rank pays the imports.
"""

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet

from rlhf.build.loops import build_loop
from rlhf.data.batch import Experience, Rollout
from rlhf.dist.agree import agree, gather, max_of
from rlhf.dist.groups import GroupFactory
from rlhf.mcore.params import local_params
from rlhf.trainers.driver_state import NOTHING_YET, DriverState
from rlhf.trainers.experience import sequences_of
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

ENGINES = ("rollout.tp=2", "rollout.dp=2")
ACTOR = ("actor.parallel.tp=2", "actor.parallel.pp=2", "actor.parallel.layers_per_stage=[3,1]")
CHUNKED = ("actor.parallel.tp=2", "actor.parallel.pp=2", "actor.parallel.vpp=2")
CRITIC = ("critic.parallel.tp=4",)
APART = (*ENGINES, "rollout.stride=2", *ACTOR, *CRITIC, "reference.parallel.dp=2", "reference.parallel.first_rank=4")
TOGETHER = (*ENGINES, *CHUNKED, *CRITIC, "reference.parallel.dp=6")
OTHER = (  # rows are owned by other ranks than above; weights are stale when a step ends
    *(f"{role}.optim.overlap_{what}=true" for role in ("actor", "critic") for what in ("grad_reduce", "param_gather")),
    *("rollout.dp=3", "rollout.first_rank=2"),
    *("actor.parallel.dp=3", "critic.parallel.pp=3", "critic.parallel.first_rank=3"),
    *("reference.parallel.tp=2", "reference.parallel.pp=3"),
    *("critic.parallel.layers_per_stage=[1,2,1]", "reference.parallel.layers_per_stage=[2,1,1]"),
    *("critic.model.init=actor", "reference.model.init=actor"),  # not read from the checkpoint as above
)


STATEFUL = (  # each step depends on numbers that all earlier ones measured over all owners
    *("ppo.shaping.normalize=running", "ppo.shaping.clip=[-1.5,1.5]", "ppo.value_loss.clip=relative"),
    *("ppo.kl_controller={kind: adaptive, target: 0.05, horizon: 20}", "ppo.value_loss.kind=huber"),
    *("ppo.value_loss.huber_delta=0.3", "ppo.length_penalty={min_tokens: 5, max_tokens: 9, cache_tokens: 4}"),
)


def _loop(folder: Path, groups: GroupFactory, *overrides: str) -> PPOLoop:
    config = load(folder, *overrides)
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    return loop


@dataclass(frozen=True, slots=True)
class Run:
    """A run's first steps: their rows over all ranks, in order of sample id, and the state after the last."""

    steps: tuple[Experience, ...]
    state: DriverState
    """That of each rank is checked to be the same."""


def _two_steps(loop: PPOLoop, group: dist.ProcessGroup) -> Run:
    state, steps = DriverState.start(loop.config), []
    for _ in range(2):
        state, mine, _ = loop.step(state)
        rows = Experience.concat(gather(mine, group))
        steps.append(rows.select(rows.scored.rollout.prompts.sample_ids.argsort()))
    return Run(tuple(steps), agree(state, group))


def _same_run(a: Run, b: Run) -> None:
    """Equal tokens; numbers equal to what fp32 sums in another order leave, after Adam steps that amplify it."""
    for one, two in zip(a.steps, b.steps, strict=True):
        torch.testing.assert_close(one.shaped.rewards, two.shaped.rewards, atol=1e-6, rtol=1e-6)
        assert torch.equal(one.scored.rollout.responses.values, two.scored.rollout.responses.values)
        for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
            x, y = getattr(one, name).values, getattr(two, name).values
            torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(
            one.old_logprobs.values, one.scored.rollout.rollout_logprobs.values, atol=1e-4, rtol=0
        )
    one, two = a.state, b.state
    summed = {"rewards": NOTHING_YET, "returns": NOTHING_YET, "kl_coef": 1.0}  # over owners, in an order of theirs
    assert replace(one, **summed) == replace(two, **summed)
    assert one.rewards.count == two.rewards.count
    assert (one.rewards.mean, one.rewards.std) == pytest.approx((two.rewards.mean, two.rewards.std), rel=1e-9)
    assert one.returns.count == two.returns.count
    assert (one.returns.mean, one.returns.std) == pytest.approx((two.returns.mean, two.returns.std), rel=1e-2)
    assert one.kl_coef == pytest.approx(two.kl_coef, rel=2e-3)


def _state_of(run: Run) -> None:
    """The state against plain arithmetic over all rows; here one process sees them, there the owners saw theirs."""
    adjusted = torch.cat([step.shaped.adjusted for step in run.steps]).double().numpy()
    state = run.state
    assert (state.step, state.prompts_taken, state.responses, state.policy_version) == (2, 10, 20, 2)
    assert state.rewards.count == len(adjusted) == 20
    assert (state.rewards.mean, state.rewards.std) == pytest.approx((adjusted.mean(), adjusted.std()), rel=1e-9)
    returns = torch.cat([step.returns.values for step in run.steps]).double().numpy()
    assert (state.returns.mean, state.returns.std) == pytest.approx((returns.mean(), returns.std()), rel=1e-9)
    expected = ((adjusted - adjusted.mean()) / adjusted.std())[10:].clip(-1.5, 1.5)
    assert run.steps[1].shaped.rewards.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    kl_coef = 0.05
    for step in run.steps:
        kl = (step.old_logprobs.values - step.ref_logprobs.values).double().sum() / 10
        kl_coef *= 1 + float((kl / 0.05 - 1).clamp(-0.2, 0.2)) * 10 / 20
    assert state.kl_coef == pytest.approx(kl_coef, rel=1e-5)


def _rows_are_dumped(loop: PPOLoop, step: int, experience: Experience, folder: Path, group: dist.ProcessGroup) -> None:
    """The file of a step holds what each owner had in hand, in the order of the global batch."""
    owners = loop._owners()
    with loop.sample_dump:
        loop.sample_dump.step_done(step, experience, owners=owners)
    texts = loop.scorer.texts(experience.scored.rollout) if loop.scorer else []
    everywhere = gather((experience, texts), group)
    if dist.get_rank() != 0:
        return
    path = folder / "runs" / loop.config.name / "samples" / f"step_{step:06d}.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    lines, taken = parquet.read_table(path).to_pylist(), [0] * len(everywhere)
    assert len(lines) == len(owners) == 10
    for line, owner in zip(lines, owners, strict=True):
        (of, words), at = everywhere[owner], taken[owner]
        taken[owner] += 1
        scored, rollout = of.scored, of.scored.rollout
        record, result = rollout.prompts.records[at], scored.results[at]
        assert (line["step"], line["sample_id"]) == (step, int(rollout.prompts.sample_ids[at]))
        assert (line["prompt"], line["response"], line["answer"]) == (record.text, words[at], record.answer)
        assert line["prompt_tokens"] == rollout.prompts.tokens.rows()[at].tolist()
        assert line["response_tokens"] == rollout.responses.rows()[at].tolist()
        assert line["response_length"] == len(line["response_tokens"]) == len(line["old_logprobs"])
        assert (line["score"], line["error"]) == (pytest.approx(result.score), "")
        assert (line["reward"], line["valid"]) == (float(of.shaped.rewards[at]), True)
        assert line["policy_versions"] == [step - 1] * line["response_length"]
        assert line["policy_version"] == step - 1
        for name, ragged in (
            ("rollout_logprobs", rollout.rollout_logprobs),
            ("old_logprobs", of.old_logprobs),
            ("ref_logprobs", of.ref_logprobs),
            ("values", of.values),
            ("token_rewards", of.rewards),
            ("advantages", of.advantages),
            ("returns", of.returns),
            ("loss_mask", of.loss_mask),
        ):
            assert line[name] == ragged.rows()[at].tolist(), name
        assert line["advantage_mean"] == pytest.approx(sum(line["advantages"]) / line["response_length"], rel=1e-5)


def _critic_alone(loop: PPOLoop, experience: Experience, folder: Path, groups: GroupFactory) -> None:
    """The critic gives the same values on its own layout beside the actor as in one process alone."""
    alone = _loop(folder, groups, *ENGINES, "name=alone", "actor.parallel.dp=4", "reference.parallel.dp=6")
    owners = loop._owners()
    sequences = sequences_of(experience.scored.rollout)
    values = alone.models.critic.values(sequences, owners=owners).collect().scores
    alone.calls.flush()
    torch.testing.assert_close(values.values, experience.values.values, atol=1e-5, rtol=1e-5)


def _mismatch(loop: PPOLoop, state: DriverState, group: dist.ProcessGroup) -> float:
    """Largest difference between the engine's log-probs of fresh samples and the trainer's, over all ranks."""
    with loop.phases.rollout():
        if loop.engine is not None:
            loop.engine.wake()  # as at the end of a sync
        generated = loop.generation.step(state)
    assert generated is not None
    rollout = generated.rollout
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


def _engine_follows_the_trainer(loop: PPOLoop, state: DriverState, group: dist.ProcessGroup) -> None:
    """After each of 3 updates that moved log-probs, both sides agree; with one tensor left out they do not."""
    stale: dict[str, torch.Tensor] = {}
    for _ in range(3):
        stale = {name: param.clone() for name, param in loop.engine.params().items()} if loop.engine else {}
        state, experience, _ = loop.step(state)
        assert _moved(loop, experience, group) >= 1e-2
        stats = loop.policy_sync.update_weights(policy_version=state.policy_version)
        assert stats is None or (stats.moved > 0 and stats.ratio == 1.0)
        assert _mismatch(loop, state, group) < 1e-4
    names = sorted({name for held in gather(_tensors(loop), group) for name in held})
    assert len(names) > 30
    unseen = []
    for name in names:
        fresh = _leave_out(loop, name, stale)
        if _mismatch(loop, state, group) < 1e-4:
            unseen.append(name)
        for param, values in fresh.items():
            loop.engine.params()[param].copy_(values)
    assert not unseen, f"a sync without these is not noticed: {unseen}"
    assert _mismatch(loop, state, group) < 1e-4


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


def _nothing_counts(folder: Path, groups: GroupFactory) -> None:
    """A step in which every reward fails moves no weight, whatever the layout: not by momentum, not by decay."""
    failing = "reward.function=tests.trainers.rewards:fails"
    loop = _loop(folder, groups, *APART, failing, "name=failing", "actor.optim.weight_decay=0.1")
    models = [role.model for role in (loop.models.actor, loop.models.critic) if role.model is not None]
    before = [{name: param.clone() for name, param in local_params(model).items()} for model in models]
    _, experience, part = loop.step(DriverState.start(loop.config))
    assert not experience.loss_mask.values.any()
    for report in (part.actor, part.critic):
        assert report is None or (report.skipped_steps, report.optimizer_steps) == (2, 2)
    for model, held in zip(models, before, strict=True):
        assert all(torch.equal(param, held[name]) for name, param in local_params(model).items())


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
    apart = _loop(folder, groups, *APART, *STATEFUL, "name=apart")
    run = _two_steps(apart, group)
    _state_of(run)
    _same_run(run, _two_steps(_loop(folder, groups, *TOGETHER, *STATEFUL, "name=together"), group))
    other = _loop(folder, groups, *OTHER, *STATEFUL, "name=other", "actor.microbatch_tokens=40")
    _same_run(run, _two_steps(other, group))
    fresh = _loop(folder, groups, *APART, "name=fresh", "log.samples_every_steps=1")
    _, mine, _ = fresh.step(DriverState.start(fresh.config))
    _rows_are_dumped(fresh, 1, mine, folder, group)
    _critic_alone(fresh, mine, folder, groups)
    _engine_follows_the_trainer(apart, run.state, group)
    _nothing_counts(folder, groups)
    _most_ranks_own_no_row(folder, groups)


@pytest.mark.dist
@pytest.mark.slow
def test_layouts_and_pools_do_not_change_a_run_and_the_engine_follows_the_trainer(tmp_path: Path) -> None:
    make_files(tmp_path, num_layers=4)
    run_ranks(6, _all_checks, tmp_path)
