"""Faults in a whole PPO run on the tiny model: flagged in the step in which they are, named, recorded, or the end."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.dist.groups import GroupFactory
from rlhf.errors import CheckpointError, ConfigError, DataError, LayoutError, MismatchError
from rlhf.mcore import score
from rlhf.reshard.stats import ReshardStats
from rlhf.rollout.native import sampler
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.policy_sync import PolicySync
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

Plant = Callable[[pytest.MonkeyPatch], None]


def _build(folder: Path, *settings: str) -> PPOLoop:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    config = load(folder, *settings)
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    return loop


def a_tensor_after_the_sync(patch: pytest.MonkeyPatch) -> None:
    """Once, on the last rank."""
    update, times = PolicySync.update_weights, []

    def spoiled(self: PolicySync, *, policy_version: int) -> ReshardStats | None:
        stats = update(self, policy_version=policy_version)
        if dist.get_rank() == dist.get_world_size() - 1 and not times and self._engine is not None:
            next(p for name, p in self._engine.params().items() if name.endswith("down.weight")).mul_(1.2)
        times.append(policy_version)
        return stats

    patch.setattr(PolicySync, "update_weights", spoiled)


def another_temperature(patch: pytest.MonkeyPatch) -> None:
    sample = sampler.sample
    patch.setattr("rlhf.rollout.native.decoder.sample", lambda logits, *rest: sample(logits / 1.4, *rest))


def rows_that_see_each_other(patch: pytest.MonkeyPatch) -> None:
    pack = score.pack

    def faulty(*args: Any, **kwargs: Any) -> Any:
        packed = pack(*args, **kwargs)
        ends = packed.params.cu_seqlens_q
        packed.params.cu_seqlens_q = packed.params.cu_seqlens_kv = torch.cat([ends[:1], ends[1:-1] - 1, ends[-1:]])
        packed.params.max_seqlen_q = packed.params.max_seqlen_kv = packed.tokens.numel()
        return packed

    patch.setattr(score, "pack", faulty)


FAULTS = {
    "weights": a_tensor_after_the_sync,
    "sampling": another_temperature,
    "packing": rows_that_see_each_other,
}


@contextmanager
def _in_place(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


def _warns_and_goes_on(folder: Path, settings: tuple[str, ...]) -> None:
    loop = _build(folder, *settings)
    state = DriverState.start(loop.config)
    records = folder / "runs" / loop.config.name / "mismatch"
    with loop.reporter, loop.sample_dump:
        for step, cause in enumerate(("", "weights", "", "sampling", "", "", "", "packing", ""), start=1):
            with _in_place(FAULTS[cause]) if cause else pytest.MonkeyPatch.context():
                began = state
                with loop.timers.phase("step"):
                    state, experience, part = loop.step(began)
            loop.reporter.step_done(began, part, experience.scored, None)
            assert part.mismatch is not None
            assert (part.mismatch.breach, part.mismatch.tokens) == (float(bool(cause)), 70), (step, part.mismatch)
            assert (part.mismatch.kl < 1e-6) != bool(cause), (step, part.mismatch)
            assert cause or abs(part.mismatch.ratio - 1.0) < 1e-4, (step, part.mismatch)
            if dist.get_rank() == 0:
                found = records / f"step_{step:06d}.json"
                # The third breach is told by the metric alone: a triage follows the first, second, fourth, ...
                assert found.exists() == (cause in ("weights", "sampling")), (step, cause)
                if found.exists():
                    assert json.loads(found.read_text())["cause"] == cause, found.with_suffix(".txt").read_text()


@pytest.mark.dist
def test_a_warned_run_names_the_cause_and_is_right_again_in_the_next_step(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(2, _warns_and_goes_on, tmp_path, ("rollout.dp=2", "actor.parallel.tp=2", "critic.parallel.dp=2"))
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["mismatch/breach"] for line in lines] == [0, 1, 0, 1, 0, 0, 0, 1, 0]
    assert lines[1]["mismatch/kl"] > 1e-6 > lines[2]["mismatch/kl"]


def _stops(folder: Path, cause: str) -> None:
    loop = _build(folder, f"name=stop_{cause}", "mismatch.on_breach=stop")
    assert loop.models.actor.model is not None
    before = [param.clone() for param in loop.models.actor.model.module.parameters()]
    refused = pytest.raises(MismatchError, match=rf"step 1: .* cause: {cause}: ")
    with loop.reporter, loop.sample_dump, _in_place(FAULTS[cause]), refused as caught:
        loop.step(DriverState.start(loop.config))
    assert not isinstance(caught.value, ConfigError | LayoutError | DataError | CheckpointError)  # those end with 2
    now = loop.models.actor.model.module.parameters()
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))  # nothing was learned from these samples


@pytest.mark.dist
def test_a_run_that_is_to_stop_learns_nothing_from_the_step(tmp_path: Path) -> None:
    make_files(tmp_path)
    for cause in ("sampling", "packing"):
        run_ranks(1, _stops, tmp_path, cause)
