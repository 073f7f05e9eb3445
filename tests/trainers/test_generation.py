"""A step learns from as many rows as ever when more prompts are asked, and no prompt is lost or learned from twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.build.loops import build_loop
from rlhf.config.run import PPORunConfig
from rlhf.data.batch import Experience, FinishReason
from rlhf.dist.groups import GroupFactory
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.ppo import PPOLoop
from tests.harness.ranks import run_ranks
from tests.trainers.tiny_run import load, make_files, ranks_here

SETTINGS = (
    *("rollout.dp=2", "actor.parallel.tp=2", "rollout.oversample=0.6", "checkpoint.every_steps=2", "num_steps=9"),
    *(
        "rollout.sampling={max_new_tokens: 16, ignore_eos: true}",
        "checkpoint.asynchronous=false",
        "rollout.max_running=3",
    ),
)


@contextmanager
def _opened(config: PPORunConfig, groups: GroupFactory) -> Iterator[PPOLoop]:
    loop = build_loop(config, ranks_here(Path(config.log.folder) / config.name, groups))
    assert isinstance(loop, PPOLoop)
    with loop.checkpoints, loop.reporter, loop.sample_dump:
        yield loop
    assert loop.engine is not None
    loop.engine.close()


def _everywhere(value: object) -> list:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _step(loop: PPOLoop, began: DriverState) -> tuple[DriverState, Experience, list[int]]:
    """A step, its rows here, and the prompts that all ranks learned from."""
    with loop.timers.phase("step"):
        state, experience, part = loop.step(began)
    loop.reporter.step_done(began, part, experience.scored, None)
    loop.checkpoints.step_done(state)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert _everywhere(state) == [state] * num_ranks
    rollout = experience.scored.rollout
    assert len(rollout) == 2 * len(range(rank, 5, num_ranks))  # of 5 prompts with 2 samples each
    assert rollout.prompts.sample_ids.tolist() == [
        2 * p + k for p in rollout.prompts.prompt_ids.tolist()[::2] for k in (0, 1)
    ]
    assert all(record.text for record in rollout.prompts.records)
    assert set(rollout.finish_reasons.tolist()) == {FinishReason.LENGTH}
    assert set(rollout.responses.lengths.tolist()) == {16}
    assert experience.loss_mask.values.all()
    for versions in rollout.policy_versions.rows():
        assert (versions.diff() >= 0).all()
        assert 0 <= versions[0] <= versions[-1] <= began.policy_version
    owned = _everywhere(rollout.prompts.prompt_ids.unique().tolist())
    learned = sorted(p for prompts in owned for p in prompts)
    assert [learned[first::num_ranks] for first in range(num_ranks)] == owned
    return state, experience, learned


def _continued(folder: Path, groups: GroupFactory) -> None:
    config = load(folder, *SETTINGS, "name=continued", "rollout.tail=continue")
    learned: list[int] = []
    stale = 0
    with _opened(config, groups) as loop:
        state = DriverState.start(config)
        for _ in range(3):
            began = state
            state, experience, prompts = _step(loop, began)
            learned += prompts
            assert len(state.begun_prompts) == 3  # 8 are asked, 5 are kept
            assert sorted((*learned, *state.begun_prompts)) == list(range(state.prompts_taken))
            versions = experience.scored.rollout.policy_versions.values
            stale += int((versions < began.policy_version).sum())
        assert sum(_everywhere(stale)) > 0
        assert sum(_everywhere(len(loop.generation._begun))) > 0
    learned_by_two = [p for p in learned if p not in prompts]
    with _opened(config, groups) as loop:  # the third step was after the last checkpoint, and is lost
        state = loop.start
        assert state.step == 2
        assert sorted((*learned_by_two, *state.begun_prompts)) == list(range(state.prompts_taken))
        again = state.begun_prompts
        state, experience, prompts = _step(loop, state)
        assert set(experience.scored.rollout.policy_versions.values.tolist()) == {2}  # begun ones begin anew
        assert not set(prompts) & set(learned_by_two)
        assert set(again) <= {*prompts, *state.begun_prompts}
        assert sorted((*learned_by_two, *prompts, *state.begun_prompts)) == list(range(state.prompts_taken))


def _dropped(folder: Path, groups: GroupFactory) -> None:
    config = load(folder, *SETTINGS, "name=dropped", "rollout.tail=drop")
    with _opened(config, groups) as loop:
        state = DriverState.start(config)
        for step in range(2):
            state, experience, prompts = _step(loop, state)
            assert len(prompts) == 5
            assert set(prompts) <= set(range(8 * step, 8 * step + 8))
            assert (state.prompts_taken, state.begun_prompts) == (8 * step + 8, ())
            assert set(experience.scored.rollout.policy_versions.values.tolist()) == {step}
            assert len(loop.generation._begun) == 0


def _all_checks(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    _continued(folder, groups)
    _dropped(folder, groups)


def _whole_before(folder: Path) -> None:
    """All responses are as long, so those that were not needed are whole when the first step ends."""
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    sampling = "rollout.sampling={max_new_tokens: 16, ignore_eos: true}"
    whole = (sampling, "rollout.max_running=64", "rollout.kv_cache_tokens=4096")
    strict = ("rollout.tail=continue", "rollout.oversample=1.0", "mismatch.on_breach=stop", "name=whole")
    config = load(folder, *whole, *strict)
    with _opened(config, groups) as loop:
        state = DriverState.start(config)
        for tokens, older in ((160, 0), (0, 160)):
            with loop.timers.phase("step"):
                state, _, part = loop.step(state)
            assert part.mismatch is not None
            assert (part.mismatch.tokens, part.mismatch.other_tokens, part.mismatch.breach) == (tokens, older, 0)


@pytest.mark.dist
def test_a_step_of_responses_that_were_whole_before_it_is_no_mismatch(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(1, _whole_before, tmp_path)


@pytest.mark.dist
def test_more_prompts_than_a_step_needs_are_asked_and_what_is_left_over_goes_on_or_is_dropped(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_ranks(2, _all_checks, tmp_path)
