"""What a resume reads of the steps before it."""

import json
import math
from dataclasses import replace

from rlhf.metrics.earlier import EarlierPart, HeldOutRecord
from rlhf.metrics.names import ClockMetrics, HeldOutMetrics, SFTMetrics, StepMetrics
from rlhf.metrics.run_folder import RunFolder
from rlhf.metrics.sinks import JsonlSink
from tests.metrics.test_run_folder import SAMPLE


def _held_out(solved):
    return HeldOutMetrics(solved=solved, reward=2 * solved, pass_at_k=3 * solved, problems=8)


def _write(folder, steps):
    sink = JsonlSink(folder.metrics)
    for step, values in steps.items():
        sink.write(step, values)
    sink.close()


def test_a_run_that_begins_has_none(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    assert EarlierPart.read(folder, None) == EarlierPart()


def test_rewards_seconds_and_evaluations_come_back_as_they_were_written(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    _write(
        folder,
        {
            0: StepMetrics(clock=ClockMetrics(seconds=1.5), held_out=_held_out(0.25)).flatten(),
            1: {"reward/mean": 0.1, **StepMetrics(clock=ClockMetrics(seconds=2.25)).flatten()},
            2: {"reward/mean": math.nan, **StepMetrics(held_out=_held_out(0.5)).flatten()},
            3: {"reward/mean": 0.3, **StepMetrics(clock=ClockMetrics(seconds=7.1), held_out=_held_out(0.75)).flatten()},
        },
    )
    of_steps = [replace(SAMPLE, step=n, split="held_out", sample_id=10 * n + i) for n in (0, 2, 3) for i in range(2)]
    folder.add_samples([SAMPLE, *of_steps, SAMPLE])
    found = EarlierPart.read(folder, 3)
    assert (found.steps, found.seconds, found.losses) == (3, 7.1, ())
    assert found.rewards[::2] == (0.1, 0.3)
    assert math.isnan(found.rewards[1])
    assert found.before.metrics == _held_out(0.25)
    assert found.after.metrics == _held_out(0.75)
    assert [s.sample_id for s in found.before.samples + found.after.samples] == [0, 1, 30, 31]
    written, read = of_steps[0], found.before.samples[0]
    assert math.isnan(read.reward)
    assert replace(read, reward=0.0) == replace(written, reward=0.0)


def test_losses_of_fine_tuning_come_back_to_the_bit(tmp_path):
    folder, losses = RunFolder.create(tmp_path / "one", ""), (2.1, 1 / 3, 0.1 + 0.2)
    step = SFTMetrics(loss=0, grad_norm=1, clip_factor=1, lr=1, skipped_steps=0)
    _write(folder, {n: StepMetrics(sft=replace(step, loss=x)).flatten() for n, x in enumerate(losses, 1)})
    found = EarlierPart.read(folder, 3)
    assert found == EarlierPart(steps=3, losses=losses)


def test_records_that_are_gone_or_of_another_form_are_left_out(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    assert EarlierPart.read(folder, 3) == EarlierPart(steps=3)
    _write(folder, {0: StepMetrics(held_out=_held_out(0.5)).flatten(), 2: {"reward/mean": 1.0, "held_out/solved": 1.0}})
    folder.samples.write_text(json.dumps({"step": 0, "split": "held_out"}) + "\n")
    found = EarlierPart.read(folder, 3)
    assert [math.isnan(reward) for reward in found.rewards] == [True, False, True]
    assert (found.before, found.after) == (HeldOutRecord(_held_out(0.5), ()), None)


def test_a_run_that_began_from_another_ones_checkpoint_counts_from_there(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    step = {"time/step": 1.0, "rate/tokens": 1.0}
    _write(
        folder,
        {
            5: StepMetrics(clock=ClockMetrics(seconds=1.5), held_out=_held_out(0.25)).flatten(),
            6: {"reward/mean": 0.6, **step},
            7: {"reward/mean": 0.7, **step, **StepMetrics(held_out=_held_out(0.5)).flatten()},
        },
    )
    found = EarlierPart.read(folder, 7)
    assert found.rewards == (0.6, 0.7)
    assert (found.before.metrics, found.after.metrics) == (_held_out(0.25), _held_out(0.5))
    folder.metrics.unlink()
    _write(folder, {6: {"reward/mean": 0.6, **step, **StepMetrics(held_out=_held_out(0.5)).flatten()}})
    found = EarlierPart.read(folder, 6)
    assert (found.rewards, found.before, found.after.metrics) == ((0.6,), None, _held_out(0.5))
