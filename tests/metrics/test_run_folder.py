"""What lies in a run folder, and what happens to an earlier run of the same name."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from rlhf.errors import ConfigError
from rlhf.metrics.run_folder import RunFolder, SampleRecord, Summary

SAMPLE = SampleRecord(
    step=2,
    split="train",
    sample_id=17,
    prompt="1 + 2 =",
    response=" 3 é",
    answer="3",
    reward=math.nan,
    error="",
    reward_parts={"score": 1.0},
    prompt_tokens=7,
    response_tokens=3,
    finish_reason="stop",
    policy_version=1,
)


def test_a_new_folder_holds_config_and_places_for_the_rest(tmp_path):
    folder = RunFolder.create(tmp_path / "runs" / "one", "seed: 1\n")
    assert folder.config.read_text() == "seed: 1\n"
    assert folder.checkpoints.is_dir()
    folder.rank_log(3).write_text("log")
    assert (tmp_path / "runs/one/logs/rank_3.log").read_text() == "log"
    assert not [p for p in folder.path.iterdir() if p.name.startswith(".")]


def test_samples_that_do_not_fit_leave_no_part_of_a_line(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    folder.add_samples([SAMPLE])
    whole = folder.samples.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 5 // 2, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.add_samples([SAMPLE, SAMPLE, SAMPLE])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.samples.read_bytes() == whole


def test_samples_and_summary_are_valid_json(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    folder.add_samples([SAMPLE])
    folder.add_samples([SAMPLE, SAMPLE])
    lines = folder.samples.read_text().splitlines()
    assert len(lines) == 3
    record = json.loads(lines[0], parse_constant=pytest.fail)
    assert record["reward"] is None
    assert record["response"] == " 3 é"
    assert record["reward_parts"] == {"score": 1.0}
    folder.write_summary(
        Summary(
            steps=5,
            seconds=1.5,
            held_out_before=math.nan,
            held_out_after=0.5,
            reward_first=0.1,
            reward_last=0.2,
            more={"tokens": 7},
        )
    )
    assert json.loads(folder.summary.read_text()) == {
        "steps": 5,
        "seconds": 1.5,
        "held_out_before": None,
        "held_out_after": 0.5,
        "reward_first": 0.1,
        "reward_last": 0.2,
        "tokens": 7,
    }


def test_what_an_earlier_run_left_is_moved_aside(tmp_path):
    for number in range(3):
        folder = RunFolder.create(tmp_path / "one", f"number: {number}\n")
        folder.metrics.write_text(f"{number}")
        (folder.checkpoints / f"step_{number}").mkdir()
    assert {p.name: (p / "metrics.jsonl").read_text() for p in tmp_path.iterdir()} == {
        "one": "2",
        "one.1": "0",
        "one.2": "1",
    }
    assert [p.name for p in (tmp_path / "one.2" / "checkpoints").iterdir()] == ["step_1"]
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step_2"]


def test_the_files_of_the_running_job_stay_where_they_are(tmp_path):
    RunFolder.create(tmp_path / "one", "")
    folder = RunFolder(tmp_path / "one")
    (folder.path / "heartbeat").mkdir()
    for path in (folder.rank_log(0), folder.path / "heartbeat" / "rank_0.json", folder.path / ".launch_0.lock"):
        path.write_text("now")
    with folder.rank_log(1).open("w") as log:
        RunFolder.create(tmp_path / "one", "")
        log.write("written on")
    assert folder.rank_log(1).read_text() == "written on"
    assert folder.rank_log(0).read_text() == "now"
    assert (folder.path / "heartbeat" / "rank_0.json").exists()
    assert (folder.path / ".launch_0.lock").exists()
    assert sorted(p.name for p in (tmp_path / "one.1").iterdir()) == ["checkpoints", "config.yaml", "started.json"]


def test_a_run_that_is_going_on_is_not_touched(tmp_path):
    code = (
        "import sys, pathlib; from rlhf.metrics.run_folder import RunFolder\n"
        f"RunFolder.create(pathlib.Path({str(tmp_path)!r}) / 'one', 'first: 1')\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        for resume_step in (None, 3):
            with pytest.raises(ConfigError, match=rf"a run is going on in .*one \(process {other.pid}\).*touch .*stop"):
                RunFolder.open(tmp_path / "one", "second: 1", resume_step=resume_step)
            assert (tmp_path / "one" / "config.yaml").read_text() == "first: 1"
        other.stdin.close()
        other.wait()
    # it has died without an exit.json, and its process is gone
    assert RunFolder.create(tmp_path / "one", "second: 1").config.read_text() == "second: 1"
    assert (tmp_path / "one.1" / "config.yaml").read_text() == "first: 1"


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log\.folder: .*cannot be used"):
        RunFolder.create(tmp_path / "file" / "one", "")


def _fill(folder, last_step):
    """What a run leaves that was killed in the middle of a line."""
    for step in range(last_step + 1):
        with folder.metrics.open("a") as file:
            file.write(f'{{"step": {step}, "reward/mean": {step}.5}}\n')
        folder.add_samples([replace(SAMPLE, step=step), replace(SAMPLE, step=step, split="held_out")])
        folder.write_mismatch(step, {"step": step}, "why")
        for path in (folder.sample_dump(step), folder.timeline(step, "json"), folder.torch_trace(step, 1)):
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(step))
    for path in (folder.metrics, folder.samples):
        with path.open("a") as file:
            file.write(f'{{"step": {last_step + 1}, "rewa')
    folder.write_summary(
        Summary(steps=1, seconds=1, held_out_before=0, held_out_after=0, reward_first=0, reward_last=0)
    )


def _held(folder):
    """Everything in it but what names the process."""
    files = [path for path in sorted(folder.path.rglob("*")) if path.is_file() and path.name != "started.json"]
    return {str(path.relative_to(folder.path)): path.read_text() for path in files}


def test_a_run_that_goes_on_keeps_what_its_checkpoint_knows_and_nothing_of_later_steps(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "first: 1\n")
    _fill(folder, 7)
    (folder.checkpoints / "step_5").mkdir()
    folder.tracker.write_text("{}")
    folder = RunFolder.open(tmp_path / "one", "second: 1\n", resume_step=5)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    assert (folder.checkpoints / "step_5").is_dir()
    assert folder.config.read_text() == "second: 1\n"
    assert folder.metrics.read_text() == "".join(f'{{"step": {n}, "reward/mean": {n}.5}}\n' for n in range(6))
    records = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [(r["step"], r["split"]) for r in records] == [(n, of) for n in range(6) for of in ("train", "held_out")]
    dumps = [folder.sample_dump(n) for n in range(8)]
    lines = [path for n in range(8) for path in (folder.timeline(n, "json"), folder.torch_trace(n, 1))]
    assert [path for path in dumps + lines if path.exists()] == dumps[:6] + lines[:12]
    found = [folder.mismatch(n, ending) for n in range(8) for ending in ("json", "txt")]
    assert [path for path in found if path.exists()] == found[:12]
    assert not folder.summary.exists(), "it would say that the run is at its end"
    assert folder.tracker.exists()


def test_of_two_lines_of_one_step_the_later_counts_and_steps_ascend(tmp_path):
    folder = RunFolder.create(tmp_path / "one", "")
    folder.metrics.write_text("".join(f'{{"step": {n}, "at": {i}}}\n' for i, n in enumerate((0, 1, 3, 2, 3, 4))))
    RunFolder.open(tmp_path / "one", "", resume_step=3)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines == [{"step": 0, "at": 0}, {"step": 1, "at": 1}, {"step": 2, "at": 3}, {"step": 3, "at": 4}]


def test_a_crash_while_a_record_is_cut_leaves_each_file_old_or_new_and_the_next_resume_ends_the_work(
    tmp_path, monkeypatch
):
    template = RunFolder.create(tmp_path / "template", "first: 1\n")
    _fill(template, 4)
    shutil.copytree(template.path, tmp_path / "whole")
    before, after = _held(template), _held(RunFolder.open(tmp_path / "whole", "second: 1\n", resume_step=2))
    calls, real = 0, os.fsync

    def crash_at(number):
        def fsync(descriptor):
            nonlocal calls
            calls += 1
            if calls == number:
                raise KeyboardInterrupt
            real(descriptor)

        return fsync

    for number in range(1, 5):  # started.json, config.yaml, metrics.jsonl, samples.jsonl
        path = tmp_path / str(number)
        shutil.copytree(template.path, path)
        calls = 0
        monkeypatch.setattr(os, "fsync", crash_at(number))
        with pytest.raises(KeyboardInterrupt):
            RunFolder.open(path, "second: 1\n", resume_step=2)
        monkeypatch.undo()
        for name in ("metrics.jsonl", "samples.jsonl", "config.yaml"):
            assert (path / name).read_text() in (before[name], after[name])
        assert (path / "samples.jsonl").read_text() == before["samples.jsonl"], "the crash was too late to tell"
        assert _held(RunFolder.open(path, "second: 1\n", resume_step=2)) == after


def test_a_run_that_goes_on_without_records_begins_them(tmp_path):
    folder = RunFolder.open(tmp_path / "one", "first: 1\n", resume_step=3)
    assert folder.config.read_text() == "first: 1\n"
    assert not folder.metrics.exists()


def test_without_a_step_to_go_on_from_the_earlier_run_is_moved_aside(tmp_path):
    RunFolder.open(tmp_path / "one", "first: 1\n", resume_step=None)
    RunFolder.open(tmp_path / "one", "second: 1\n", resume_step=None)
    assert (tmp_path / "one.1" / "config.yaml").read_text() == "first: 1\n"
