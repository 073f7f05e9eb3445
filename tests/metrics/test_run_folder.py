"""What lies in a run folder, and what happens to an earlier run of the same name."""

import json
import math
import subprocess
import sys

import pytest

from rlhf.errors import ConfigError
from rlhf.metrics.run_folder import RunFolder, SampleRecord, Summary, write_whole

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
        with pytest.raises(ConfigError, match=rf"a run is going on in .*one \(process {other.pid}\).*touch .*stop"):
            RunFolder.create(tmp_path / "one", "second: 1")
        other.stdin.close()
        other.wait()
    # it has died without an exit.json, and its process is gone
    assert RunFolder.create(tmp_path / "one", "second: 1").config.read_text() == "second: 1"
    assert (tmp_path / "one.1" / "config.yaml").read_text() == "first: 1"


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log\.folder: .*cannot be used"):
        RunFolder.create(tmp_path / "file" / "one", "")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
