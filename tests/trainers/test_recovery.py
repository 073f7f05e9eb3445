"""Engines that are lost in the middle of a run: the run goes on, and comes to what it would have come to."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.config.rollout import RolloutConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineLostError, WeightSyncError
from rlhf.metrics import curves
from rlhf.trainers.ppo import PPOLoop
from rlhf.trainers.recovery import Losses, Recovery
from tests.harness.ranks import run_ranks
from tests.trainers.losable import LOST, LosableEngine
from tests.trainers.tiny_run import load, make_files, ranks_here

TIMES = ("seconds", "time/", "rate/", "rollout/", "memory/", "tokens_per")
"""Metrics that tell of time, or of how the engines did their work."""


def _run(folder: Path, groups: GroupFactory, name: str, *overrides: str) -> tuple[list[dict], PPOLoop]:
    LosableEngine.calls, LosableEngine.restarts = {}, 0
    config = load(
        folder,
        f"name={name}",
        "rollout.engine=tests.trainers.losable:LosableEngine",
        "actor.parallel.dp=2",
        "critic.parallel.tp=2",
        "reference.parallel.dp=2",
        "rollout.dp=2",
        *overrides,
    )
    run_folder = folder / "runs" / name
    loop = build_loop(config, ranks_here(run_folder, groups))
    assert isinstance(loop, PPOLoop)
    loop.run()
    dist.barrier()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not _is_time(k)} for line in lines], loop


def _is_time(name: str) -> bool:
    return any(part in name for part in TIMES) or name.startswith(("sync/", "engines/"))


def _runs(folder: Path) -> None:
    torch.set_num_threads(1)
    groups, rank = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)), dist.get_rank()
    curves.draw_curves = lambda *_: None  # they take longer than the runs
    LosableEngine.plan = frozenset()
    without, _ = _run(folder, groups, "without")
    assert [line["step"] for line in without] == [0, 1, 2, 3]
    # Before there is anything, one of them twice; in the first evaluation; both in the middle of the first step's rows;
    # at the end of an update; as it goes to sleep, and again while it starts anew after that.
    plans = (
        {("start", 1), ("start", 2), ("run", 2), ("sleep", 3), ("restart", 2)},
        {("start", 1), ("run", 1), ("run", 2), ("weights_updated", 4)},
    )
    LosableEngine.plan = frozenset(plans[rank])
    found, loop = _run(folder, groups, "with", "rollout.on_loss=replace", "rollout.sleep=all", "rollout.max_losses=9")
    assert found == without, [
        {k: (a[k], b[k]) for k in a if a[k] != b.get(k)} for a, b in zip(found, without, strict=True)
    ]
    assert LosableEngine.restarts == 3
    assert loop.recovery.num_losses == 9
    _a_policy_of_stopping(folder, groups, rank)
    _too_many(folder, groups, rank)
    _a_failed_sync_without_a_loss()


def _a_policy_of_stopping(folder: Path, groups: GroupFactory, rank: int) -> None:
    config = RolloutConfig(on_loss="stop")
    recovery = Recovery(config, losses=Losses(config, rank=rank, group=None), engine=None)
    with pytest.raises(EngineLostError, match="scheduler tp 0"):
        recovery.go(lambda: None, _raise_lost)
    assert recovery.go(lambda: 3, lambda synced: synced + 1) == (3, 4)


def _too_many(folder: Path, groups: GroupFactory, rank: int) -> None:
    LosableEngine.plan = frozenset({("run", 1), ("run", 2), ("run", 3)} if rank == 1 else ())
    with pytest.raises(EngineLostError, match=r"rollout\.max_losses: 3 engines lost"):
        _run(folder, groups, "too_many", "rollout.on_loss=replace", "rollout.max_losses=2")


def _a_failed_sync_without_a_loss() -> None:
    group = dist.new_group([0, 1], backend="gloo")
    config = replace(RolloutConfig(), on_loss="replace")
    recovery = Recovery(config, losses=Losses(config, rank=dist.get_rank(), group=group), engine=None)
    with pytest.raises(WeightSyncError, match="the sums differ"):
        recovery.go(_raise_sync, lambda _: None)


def _raise_lost(_: object) -> None:
    raise EngineLostError(LOST)


def _raise_sync() -> None:
    raise WeightSyncError("the sums differ")


@pytest.mark.dist
def test_a_run_that_loses_engines_comes_to_what_it_would_have_come_to(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(2, _runs, tmp_path)
