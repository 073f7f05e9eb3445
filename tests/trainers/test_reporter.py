"""What a run says of itself when it was started several times: one record, one summary, one report."""

import errno
import json
import math
from dataclasses import replace

import pytest
import torch.distributed as dist

from rlhf.config.load import load_config
from rlhf.data.batch import ScoredRollout
from rlhf.dist.stop_request import StopRequest
from rlhf.metrics.earlier import EarlierPart
from rlhf.metrics.run_folder import RunFolder
from rlhf.metrics.sinks import JsonlSink, SinkSet
from rlhf.metrics.timers import Timers
from rlhf.trainers.driver_state import DriverState
from rlhf.trainers.evaluation import EvaluationResult
from rlhf.trainers.reporter import Desk, Reporter
from rlhf.trainers.step_stats import StepPart, samples_of
from tests.metrics.test_run_folder import SAMPLE
from tests.trainers.test_experience import CONFIG as PPO
from tests.trainers.test_experience import experience
from tests.trainers.tiny_run import CONFIG

NUM_PROBLEMS = 4


class KilledError(Exception):
    pass


class Notes:
    """A display that keeps what it is told."""

    def __init__(self):
        self.told = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def note(self, text):
        self.told.append(text)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _evaluated(step, solved, order=range(NUM_PROBLEMS)):
    """`order`: of the problems' owners, which another layout changes."""
    samples = [replace(SAMPLE, step=step, split="held_out", sample_id=i, response=f"{i} at {step}") for i in order]
    return EvaluationResult(solved, reward=solved, pass_at_k=solved, problems=NUM_PROBLEMS, samples=tuple(samples))


def _part(reward):
    """Of a step in which all responses got that reward."""
    found = experience()
    scored = found.shaped.scored
    shaped = replace(found.shaped, scored=replace(scored, scores=scored.scores * 0 + reward))
    return StepPart(samples_of(replace(found, shaped=shaped), PPO, solved_at=1.0))


def _run(path, group, *, resume_step, steps, evaluations, killed=False):
    """One start of a run whose step n has reward n / 10; the text it ends with."""
    config = load_config([str(path.parent / "run.yaml"), f"name={path.name}"])
    folder, notes, timers = RunFolder.open(path, "", resume_step=resume_step), Notes(), Timers()
    earlier = EarlierPart.read(folder, resume_step)
    desk = Desk(folder, SinkSet([JsonlSink(folder.metrics)], on_failure=pytest.fail), notes, earlier)
    reporter = Reporter(config, rank=0, group=group, timers=timers, stop=StopRequest(path), scorer=None, desk=desk)
    state = DriverState(seed=1, kl_coef=0.1)
    with pytest.raises(KilledError) if killed else reporter:
        reporter.started(evaluations.get(0), step=0)
        for step in steps:
            with timers.phase("step"), timers.phase("rollout/generate"):
                pass
            began = replace(state, step=step - 1)
            reporter.step_done(began, _part(step / 10), ScoredRollout.empty(), evaluations.get(step))
        if killed:
            raise KilledError
    return folder, "\n".join(notes.told)


def test_a_run_that_was_killed_and_went_on_tells_the_same_as_one_that_was_not(tmp_path, alone):
    (tmp_path / "run.yaml").write_text(CONFIG.format(model="m", rows="r", folder=tmp_path))
    before, middle, last = _evaluated(0, 0.25), _evaluated(3, 0.5), _evaluated(6, 0.75, order=(2, 0, 3, 1))
    whole, said = _run(
        tmp_path / "whole", alone, resume_step=None, steps=range(1, 7), evaluations={0: before, 3: middle, 6: last}
    )
    parts = tmp_path / "parts"
    _run(parts, alone, resume_step=None, steps=range(1, 6), evaluations={0: before, 3: middle}, killed=True)
    _run(parts, alone, resume_step=3, steps=[4], evaluations={}, killed=True)
    folder, said_after = _run(parts, alone, resume_step=3, steps=[4, 5, 6], evaluations={6: last})

    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert [line.get("reward/mean") for line in lines[1:]] == pytest.approx([n / 10 for n in range(1, 7)])
    seconds = [line["clock/seconds"] for line in lines]
    assert seconds == sorted(seconds)
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [s["step"] for s in samples] == [step for step in (0, 3, 6) for _ in range(NUM_PROBLEMS)]

    def timeless(summary):
        return {name: value for name, value in json.loads(summary.read_text()).items() if name != "seconds"}

    assert timeless(folder.summary) == timeless(whole.summary)
    summary = json.loads(folder.summary.read_text())
    assert (summary["steps"], summary["held_out_before"], summary["held_out_after"]) == (6, 0.25, 0.75)
    assert summary["reward_first"] == pytest.approx(0.1)
    assert summary["seconds"] >= seconds[-1] > seconds[3]
    told = said.replace(str(whole.path), str(folder.path)).splitlines()[1:]  # the first line tells the seconds
    assert said_after.splitlines()[1:] == told
    for answer in ("1 at 0", "1 at 6"):
        assert answer in said_after
    assert folder.curves.stat().st_size > 1000


def test_a_run_that_begins_at_another_runs_checkpoint_tells_what_it_did_itself(tmp_path, alone):
    (tmp_path / "run.yaml").write_text(CONFIG.format(model="m", rows="r", folder=tmp_path))
    folder, _ = _run(tmp_path / "one", alone, resume_step=None, steps=[5, 6], evaluations={})
    summary = json.loads(folder.summary.read_text())
    assert summary["steps"] == 6
    assert (summary["reward_first"], summary["reward_last"]) == pytest.approx((0.5, 0.6))
    assert summary["held_out_before"] is None
    assert not math.isnan(summary["seconds"])


def test_samples_that_cannot_be_written_are_told_once_and_do_not_end_the_run(tmp_path, alone, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run.yaml").write_text(CONFIG.format(model="m", rows="r", folder=tmp_path))
    monkeypatch.setattr(RunFolder, "add_samples", full)
    evaluations = {0: _evaluated(0, 0.25), 2: _evaluated(2, 0.5)}
    folder, said = _run(tmp_path / "one", alone, resume_step=None, steps=[1, 2], evaluations=evaluations)
    assert said.count("samples are not written ([Errno 28] No space left on device); the run goes on") == 1
    assert json.loads(folder.summary.read_text())["held_out_after"] == 0.5
