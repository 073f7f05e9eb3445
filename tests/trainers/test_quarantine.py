"""An engine that holds other weights than the actor takes no part in a step; others answer, where there are any."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.dist.groups import GroupFactory
from rlhf.reshard.execute import execute
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.ppo import PPOLoop
from rlhf.trainers.scoring import WRONG_WEIGHTS
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here


@contextmanager
def _ruined(loop: PPOLoop, *ranks: int) -> Iterator[None]:
    """The engines of some ranks hold not a number everywhere, however often they are sent to."""

    def execute_badly(*args: object, **kept: object) -> None:
        execute(*args, **kept)
        if dist.get_rank() in ranks:
            assert loop.engine is not None
            for param in loop.engine.params().values():
                param.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.reshard.way.execute", execute_badly)
        yield


def _step_without_an_engine(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    config = load(folder, "rollout.dp=2", "actor.parallel.tp=2", "sync.on_mismatch=quarantine")
    loop = build_loop(config, ranks_here(folder / "runs" / config.name, groups))
    assert isinstance(loop, PPOLoop)
    rank = dist.get_rank()
    with loop.reporter, loop.sample_dump:
        with _ruined(loop, 1):
            began = DriverState.start(config)
            held_out = loop._evaluate(began)
            assert held_out is not None
            assert held_out.problems == 4  # those of the engine that is left out, too
            with loop.timers.phase("step"):
                state, experience, part = loop.step(began)
        loop.reporter.step_done(began, part, experience.scored, None)
        assert part.sync is not None
        assert part.sync.left_out == ((1,),)
        assert "rank 1 holds " in part.sync.differed
        assert len(experience) == (6, 4)[rank]
        assert {result.error for result in experience.scored.results} == {""}
        assert set(experience.scored.rollout.policy_versions.values.tolist()) == {0}
        assert experience.loss_mask.values.all()

        state, experience, part = loop.step(state)
        assert part.sync is not None
        assert (part.sync.left_out, part.sync.differed, part.sync.ratio) == ((), "", 1.0)
        assert experience.loss_mask.values.all()
        difference = experience.scored.rollout.rollout_logprobs.values - experience.old_logprobs.values
        assert difference.abs().max() < 1e-4

        with _ruined(loop, 0, 1):
            held_out = loop._evaluate(state)
            assert held_out is not None
            assert held_out.problems == 0
            began = state
            with loop.timers.phase("step"):
                state, experience, part = loop.step(began)
        loop.reporter.step_done(began, part, experience.scored, None)
        assert part.sync is not None
        assert part.sync.left_out == ((0,), (1,))
        assert len(experience) == (6, 4)[rank]
        assert set(experience.scored.rollout.policy_versions.values.tolist()) == {-1}
        assert {result.error for result in experience.scored.results} == {WRONG_WEIGHTS}
        assert not experience.loss_mask.values.any()
        assert all(param.isfinite().all() for param in loop.policy_sync._actor_params().values())


@pytest.mark.dist
def test_others_answer_for_an_engine_with_wrong_weights_and_without_others_rows_count_nothing(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(2, _step_without_an_engine, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    found = [(line["sync/quarantined_engines"], line["reward/failed"]) for line in lines[-2:]]
    assert found == [(1, 0), (2, 10)]
