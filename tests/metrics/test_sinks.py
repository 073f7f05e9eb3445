"""Where numbers go, and what happens when they cannot."""

import json
import math

import pytest

from rlhf.errors import ConfigError
from rlhf.metrics.sinks import JsonlSink, SinkSet, TensorBoardSink, WandbSink, _module


class Broken:
    def __init__(self, *, fail_at: tuple[int, ...], fail_close: bool = False) -> None:
        self.fail_at = fail_at
        self.fail_close = fail_close
        self.steps: list[int] = []

    def write(self, step, values):
        if step in self.fail_at:
            raise OSError("disk full")
        self.steps.append(step)

    def close(self):
        if self.fail_close:
            raise RuntimeError("gone")


def test_jsonl_lines_are_on_the_disk_after_each_step_and_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5, "kl/ref": math.nan, "x": -math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "reward/mean": 0.5,
        "kl/ref": None,
        "x": None,
    }
    sink.write(2, {"reward/mean": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_jsonl_goes_on_where_a_file_ends(tmp_path):
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "m.jsonl")
        sink.write(step, {})
        sink.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_sink_that_fails_is_told_once_tried_again_and_harms_no_other():
    told: list[str] = []
    broken, sound = Broken(fail_at=(1, 2), fail_close=True), Broken(fail_at=())
    sinks = SinkSet([broken, sound], on_failure=told.append)
    for step in (1, 2, 3):
        sinks.write(step, {"a": 1.0})
    assert len(told) == 1
    assert told[0].startswith("Broken: step 1 was not written (OSError: disk full)")
    assert (broken.steps, sound.steps) == ([3], [1, 2, 3])
    sinks.close()
    assert told[1:] == ["Broken: 2 steps were not written", "Broken: not closed properly (RuntimeError: gone)"]


def test_tensorboard_holds_the_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.write(3, {"reward/mean": 0.25})
    sink.write(4, {"reward/mean": math.nan})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    first, second = events.Scalars("reward/mean")
    assert (first.step, first.value) == (3, 0.25)
    assert math.isnan(second.value)


def test_a_package_that_is_missing_is_named_with_its_setting():
    with pytest.raises(ConfigError, match=r"log\.wandb: true, but nopackage cannot be imported.*log\.wandb=false"):
        _module("nopackage", "nopackage", "log.wandb")


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_in_the_folder(tmp_path):
    pytest.importorskip("wandb")
    sink = WandbSink(tmp_path, project="p", name="n", config={"seed": 1}, online=False)
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    assert list(tmp_path.rglob("*.wandb"))
