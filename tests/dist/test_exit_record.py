"""The record of how a job ended, and what the launcher makes of what is left."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from rlhf.dist.aftermath import finding_of, processes_of, settled, sweep, verdict
from rlhf.dist.exit_record import ExitCode, ExitRecord, claim, clear_marks, exit_path, read_record
from rlhf.dist.heartbeat import FINISHED, Beat, this_machine
from tests.scripts.launched import CONFIG

LOG = Path("launcher.log")


def beat(rank: int, state: str = "running") -> Beat:
    # no such process
    return Beat(
        rank=rank, host="here", machine=this_machine(), pid=2**22 + 5, started=1.0, phase="rollout", state=state
    )


def complete(folder: Path, *, beats: list[Beat], torchrun_code: int, signal: str = "") -> ExitRecord:
    finding = finding_of(beats, torchrun_code=torchrun_code, signal=signal, node="", launcher_log=LOG)
    return settled(folder, [finding] if torchrun_code else [])


def test_the_first_claim_stands(tmp_path: Path) -> None:
    first = ExitRecord(code=3, reason="it broke", rank=2)
    assert claim(tmp_path, first)
    assert not claim(tmp_path, ExitRecord(code=3, reason="a consequence", rank=0))
    assert read_record(exit_path(tmp_path)) == first
    assert json.loads(exit_path(tmp_path).read_text())["rank"] == 2


def test_a_record_cut_short_is_none(tmp_path: Path) -> None:
    assert read_record(exit_path(tmp_path)) is None
    exit_path(tmp_path).write_text('{"code": 3, "rea')
    assert read_record(exit_path(tmp_path)) is None


def test_a_ranks_record_stands_over_what_the_launcher_sees(tmp_path: Path) -> None:
    claim(tmp_path, ExitRecord(code=3, reason="it broke", rank=2))
    assert complete(tmp_path, beats=[beat(0), beat(2)], torchrun_code=1, signal="TERM").rank == 2


def test_a_good_record_does_not_hide_a_failure_of_torchrun(tmp_path: Path) -> None:
    claim(tmp_path, ExitRecord(code=0, reason="finished"))
    assert complete(tmp_path, beats=[beat(0, FINISHED)], torchrun_code=0).code == 0
    late = complete(tmp_path, beats=[beat(0, FINISHED), beat(1)], torchrun_code=1)
    assert (late.code, late.rank, late.phase) == (3, 1, "rollout")


@pytest.mark.parametrize(
    ("beats", "code", "signal", "rank", "says"),
    [
        ([beat(0), beat(1)], 143, "TERM", None, "ended by SIGTERM"),
        ([beat(0)], 1, "", 0, "died without a traceback"),
        ([], 1, "", None, "before a rank joined"),
        ([beat(0, FINISHED)], 1, "", None, "every rank finished"),
    ],
)
def test_what_is_left_is_read(
    tmp_path: Path, beats: list[Beat], code: int, signal: str, rank: int | None, says: str
) -> None:
    record = complete(tmp_path, beats=beats, torchrun_code=code, signal=signal)
    assert (record.code, record.rank) == (ExitCode.RANK_FAILED, rank)
    assert says in record.reason


def test_the_verdict_shows_this_jobs_lines_of_the_blamed_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("==== rank 1, old\nold words\n==== rank 1, new\nnew words\n")
    text = verdict(ExitRecord(code=3, reason="it broke", rank=1), tmp_path, LOG)
    assert "rank 1 failed: it broke" in text
    assert "new words" in text
    assert "old words" not in text


def test_the_verdict_after_a_signal_blames_nobody(tmp_path: Path) -> None:
    record = complete(tmp_path, beats=[beat(0), beat(1)], torchrun_code=143, signal="INT")
    text = verdict(record, tmp_path, LOG)
    assert text.startswith("launch: ended by SIGINT to the launcher\n")
    assert "failed" not in text
    assert "the end of" not in text


def test_the_verdict_on_bad_input_does_not_repeat_what_the_rank_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("==== rank 1, new\nTraceback\n")
    text = verdict(ExitRecord(code=2, reason="ConfigError: a.b: wrong", rank=1), tmp_path, LOG)
    assert "Traceback" not in text
    assert "a.b" not in text
    assert "exit code 2" in text
    assert "logs/rank_1.log" in text


def test_the_verdict_shows_what_the_ranks_said_and_not_torchruns_report(tmp_path: Path) -> None:
    launcher_log = tmp_path / "launcher.log"
    launcher_log.write_text(
        "ImportError: no module\nW1129 14:27:08.27 21326 torch/distributed/elastic/multiprocessing/api.py:1028] Sending\n"
        "Traceback of torchrun\n"
    )
    text = verdict(ExitRecord(code=3, reason="torchrun ended with 1"), tmp_path, launcher_log)
    assert "ImportError: no module" in text
    assert "of torchrun" not in text


def test_clear_marks_leaves_the_work(tmp_path: Path) -> None:
    for name in ("logs", "heartbeat", "checkpoints"):
        (tmp_path / name).mkdir()
    gone = ["exit.json", "stop", "logs/failed_rank_3.json", "heartbeat/rank_3.json"]
    kept = ["metrics.jsonl", "logs/rank_3.log", "checkpoints/x"]
    for name in gone + kept:
        (tmp_path / name).touch()
    clear_marks(tmp_path)
    assert not any((tmp_path / name).exists() for name in gone)
    assert all((tmp_path / name).exists() for name in kept)


def test_sweep_takes_the_nodes_processes_and_no_others() -> None:
    def env(job_id: str, node_rank: int) -> dict[str, str]:
        return {**os.environ, "RLHF_JOB_ID": job_id, "RLHF_NODE_RANK": str(node_rank)}

    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(sleeper, env=env("job_1", 1), start_new_session=True)
    others = [subprocess.Popen(sleeper, env=env("job_12", 1)), subprocess.Popen(sleeper, env=env("job_1", 0))]
    segment = Path(f"/dev/shm/torch_{ours.pid}_17_0")
    folder = Path(tempfile.gettempdir()) / f"rlhf_{ours.pid}_engine_x"
    try:
        segment.touch()
        folder.mkdir()
        assert [process.pid for process in processes_of("job_1", 1)] == [ours.pid]
        said = sweep("job_1", 1, [], patience_s=0.1)
        assert len(said) == 3
        assert not psutil.pid_exists(ours.pid)
        assert not segment.exists()
        assert not folder.exists()
        assert [other.poll() for other in others] == [None, None]
    finally:
        segment.unlink(missing_ok=True)
        for process in (ours, *others):
            process.kill()
            process.wait()
