"""A job of one rank without torchrun: the program a debugger runs. Jobs of several ranks: tests/scripts/test_launch.py."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.config.job import JobConfig
from rlhf.dist.exit_record import read_record
from rlhf.dist.heartbeat import read_beats
from rlhf.dist.job import environment_of_no_rank, job
from tests.scripts.launched import CONFIG, REPO


def run_alone(folder: Path, mode: str, *overrides: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    config = folder / "death.yaml"
    config.write_text(CONFIG.format(nproc=1, folder=folder))
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.death_worker", str(config), *overrides],
        cwd=REPO,
        env={**os.environ, "RLHF_TEST_MODE": mode},
        capture_output=True,
        text=True,
        timeout=120,
    )
    record = folder / "runs/death/exit.json"
    return done, json.loads(record.read_text()) if record.exists() else {}


def test_a_child_that_is_no_rank_keeps_the_jobs_marks_and_none_of_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "ROLE_RANK", "SGLANG_X"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RLHF_NODE_RANK", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = environment_of_no_rank(TMPDIR="/x")
    assert found["TMPDIR"] == "/x"
    assert found["PATH"] == os.environ["PATH"]
    assert [name for name in found if "RANK" in name or "MASTER" in name or "ELASTIC" in name] == ["RLHF_NODE_RANK"]
    assert not [name for name in found if name.startswith(("SGLANG_", "LOCAL_", "ROLE_", "PYTORCH_"))]


def test_one_rank_lives_in_this_process_and_gives_everything_back(tmp_path: Path) -> None:
    streams, handler, threads = (sys.stdout, sys.stderr), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    with job(JobConfig(device="cpu", torch_threads=1), run_folder=tmp_path / "run") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.local_world_size, ranks.device.type) == (0, 1, 1, "cpu")
        assert ranks.run_folder == tmp_path / "run"
        assert torch.get_num_threads() == 1
        group = ranks.groups.device_group([(0,)])
        dist.all_reduce(torch.ones(1), group=group)
        logging.getLogger("rlhf.test").info("a line of the log")
        assert not ranks.stop.agreed(group)
    torch.set_num_threads(threads)
    assert (sys.stdout, sys.stderr) == streams
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not dist.is_initialized()
    assert read_record(tmp_path / "run/exit.json").code == 0
    assert read_beats(tmp_path / "run")[0].state == "finished"
    log = (tmp_path / "run/logs/rank_0.log").read_text()
    assert "[rank 0] INFO rlhf.test: a line of the log" in log


def test_a_stop_request_leaves_with_75(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left, job(JobConfig(device="cpu"), run_folder=tmp_path) as ranks:
        group = ranks.groups.cpu_group([(0,)])
        os.kill(os.getpid(), signal.SIGUSR1)
        while not ranks.stop.agreed(group):
            pass
    assert left.value.code == 75
    assert read_record(tmp_path / "exit.json").code == 75


def test_an_old_stop_request_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with job(JobConfig(device="cpu"), run_folder=tmp_path) as ranks:
        assert not ranks.stop.agreed(ranks.groups.cpu_group([(0,)]))


def test_bad_data_is_told_from_a_failed_rank(tmp_path: Path) -> None:
    done, record = run_alone(tmp_path, "bad_data")
    assert done.returncode == record["code"] == 2
    assert record["reason"].startswith("DataError: rows.jsonl:3")
    assert done.stdout.startswith("[rank 0] rows.jsonl:3")
    assert "Traceback" not in done.stdout  # which tells a user nothing about the file
    assert "Traceback" in (tmp_path / "runs/death/logs/rank_0.log").read_text()


def test_a_stop_that_could_not_be_saved_is_a_failure_and_no_75(tmp_path: Path) -> None:
    done, record = run_alone(tmp_path, "stop_unsaved")
    assert done.returncode == record["code"] == 3
    assert record["reason"].startswith("SaveError: checkpoint: the run ends after step 3")
    assert "Traceback" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done, record = run_alone(tmp_path, "finish", "job.device=cuda")
    assert done.returncode == record["code"] == 2
    assert "shows 0 GPUs" in record["reason"]
    assert "job.device=cpu" in record["reason"]


def test_a_crash_in_c_leaves_its_words_in_the_log(tmp_path: Path) -> None:
    done, _ = run_alone(tmp_path, "crash_in_c")
    assert done.returncode == -signal.SIGSEGV
    log = (tmp_path / "runs/death/logs/rank_0.log").read_text()
    assert "free(): invalid pointer" in log
    assert "Segmentation fault" in log
    assert "in crash_in_c" in log  # the Python stack
