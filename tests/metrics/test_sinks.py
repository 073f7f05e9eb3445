"""Where numbers go, and what happens when they cannot."""

import json
import math
import struct
import sys
import time
import types

import pytest

from rlhf.errors import ConfigError
from rlhf.metrics.sinks import JsonlSink, SinkSet, TensorBoardSink, WandbSink, _module
from rlhf.metrics.tracker_record import TrackerRecord


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


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps in ((None, [1, 2, 3, 4]), (2, [3, 4, 5])):
        sink = TensorBoardSink(tmp_path, resume_step=resume_step)
        for step in steps:
            sink.write(step, {"reward/mean": step + (0.5 if resume_step else 0.0)})
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.5),
        (4, 4.5),
        (5, 5.5),
    ]


def test_a_package_that_is_missing_is_named_with_its_setting():
    with pytest.raises(ConfigError, match=r"log\.wandb: true, but nopackage cannot be imported.*log\.wandb=false"):
        _module("nopackage", "nopackage", "log.wandb")


class StrictTracker(types.ModuleType):
    """Stands for wandb: keeps its own step for each run id, and drops what is logged below it, as wandb does."""

    Error = type("Error", (Exception,), {})

    def __init__(self):
        super().__init__("wandb")
        self.rows: dict[str, list[tuple[int, dict]]] = {}
        self.dropped: list[dict] = []
        self.axes: list[tuple[str, str | None]] = []

    def Settings(self, **_):  # noqa: N802  # wandb's name
        return None

    def init(self, *, id, resume, mode, **_):
        assert (resume, mode) == ("allow", "offline")
        self.current = self.rows.setdefault(id, [])
        return self

    def define_metric(self, name, *, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values, *, step=None, commit=None):
        assert commit, "a row that waits for the next one is lost by a kill"
        least = self.current[-1][0] + 1 if self.current else 0
        if step is not None and step < least:
            self.dropped.append(values)
        else:
            self.current.append((least if step is None else step, values))

    def finish(self):
        pass


def _logged_over_three_starts(folder, *, pause_s=0.0):
    """Steps 1-4, killed; from step 2 again, killed at once; from step 2 to 5."""
    for start in ([1, 2, 3, 4], [3], [3, 4, 5]):
        time.sleep(pause_s)
        record = TrackerRecord(folder / "tracker.json")
        sink = WandbSink(folder, record=record, project="p", name="n", config={"seed": 1}, online=False)
        for step in start:
            sink.write(step, {"reward/mean": step / 10})
        sink.close()
    return record.id


def test_a_tracker_that_refuses_to_go_back_drops_nothing_after_a_resume(tmp_path, monkeypatch):
    tracker = StrictTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    run_id = _logged_over_three_starts(tmp_path)
    assert not tracker.dropped
    assert tracker.rows == {
        run_id: [(i, {"reward/mean": step / 10, "step": step}) for i, step in enumerate([1, 2, 3, 4, 3, 3, 4, 5])]
    }
    assert tracker.axes[:2] == [("step", None), ("*", "step")]


def test_calls_are_counted_on_the_disk_before_they_are_made(tmp_path):
    first = TrackerRecord(tmp_path / "tracker.json")
    assert [first.next_call() for _ in range(3)] == [0, 1, 2]
    second = TrackerRecord(tmp_path / "tracker.json")  # the first one's process was killed
    assert (second.id, second.next_call()) == (first.id, 3)
    assert TrackerRecord(tmp_path / "other.json").id != first.id


def _offline_records(path):
    """What a .wandb file holds: records in blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield pb.Record.FromString(whole)
            whole = b""


def _row(history):
    """wandb's step, and the values that were logged."""
    items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
    return items["_step"], {name: value for name, value in items.items() if not name.startswith("_")}


@pytest.mark.slow
def test_wandb_keeps_all_starts_of_an_offline_run_as_one_run_that_never_goes_back(tmp_path):
    pytest.importorskip("wandb")
    run_id = _logged_over_three_starts(tmp_path, pause_s=1.1)  # wandb names folders of starts by the second
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 3
    until, rows, axes = time.monotonic() + 20, [], {}
    while len(rows) < 8 and time.monotonic() < until:  # wandb's own process writes a moment after the run has finished
        time.sleep(0.1)
        records = [record for path in files for record in _offline_records(path)]
        rows = [_row(record.history) for record in records if record.HasField("history")]
        axes = {m.name or m.glob_name: m.step_metric for m in (r.metric for r in records if r.HasField("metric"))}
    assert [step for step, _ in rows] == list(range(8))
    assert [values for _, values in rows] == [{"reward/mean": n / 10, "step": n} for n in (1, 2, 3, 4, 3, 3, 4, 5)]
    assert (axes["step"], axes["*"]) == ("", "step")
