"""Every way a job ends, through scripts/launch.sh, with ranks that import torch alone."""

import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.scripts.launched import CONFIG, REPO, LaunchedJob

pytestmark = pytest.mark.dist


def test_a_good_job_ends_with_0_and_keeps_each_ranks_words(tmp_path: Path) -> None:
    code, console, record = LaunchedJob.of_mode(tmp_path, "finish", nproc=2).end()
    assert (code, record["code"], record["rank"]) == (0, 0, None)
    assert console == "hello of rank 0\n"
    assert "raw words of rank 0" in (tmp_path / "runs/death/logs/rank_0.log").read_text()
    other = (tmp_path / "runs/death/logs/rank_1.log").read_text()
    assert "hello of rank 1" in other
    assert "raw words of rank 1" in other


def test_rank_0_draws_on_the_terminal_it_was_started_from(tmp_path: Path) -> None:
    config = tmp_path / "death.yaml"
    config.write_text(CONFIG.format(nproc=1, folder=tmp_path))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 111))
    launcher = subprocess.Popen(
        ["scripts/launch.sh", "--module", "tests.dist.death_worker", str(config)],
        cwd=REPO,
        env={**os.environ, "RLHF_PYTHON": sys.executable, "RLHF_TEST_MODE": "show_console"},
        stdout=theirs,
    )
    assert launcher.wait(timeout=90) == 0
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    os.close(theirs)
    assert "terminal: True, size ConsoleDimensions(width=111, height=33)" in shown


def test_a_rank_that_raises_ends_the_others_in_their_collective(tmp_path: Path) -> None:
    code, console, record = LaunchedJob.of_mode(tmp_path, "raise_on_rank_1").end()
    assert (code, record["rank"], record["phase"]) == (3, 1, "score")
    assert "no such thing on rank 1" in record["reason"]
    assert "[rank 1] KeyError: 'no such thing on rank 1'" in console
    assert console.count("[rank 1] Traceback") == 1
    assert "[rank 0]" not in console  # a consequence, kept in its log


def test_a_killed_rank_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work_with_children")
    job.wait_for_phase("rollout", "update")
    assert len(job.seen) >= 1 + 2 * job.nproc  # torchrun, the ranks, a child of each
    job.signal_rank(2, signal.SIGKILL)
    code, console, record = job.end()
    assert (code, record["rank"]) == (3, 2)
    assert record["phase"] in ("rollout", "update")
    assert "rank 2 failed" in console
    assert "died without a traceback" in console


def test_a_stopped_rank_is_named_by_its_peers_and_killed(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work_with_children")
    job.wait_for_phase("rollout", "update")
    job.signal_rank(2, signal.SIGSTOP)
    code, console, record = job.end()
    assert (code, record["rank"]) == (3, 2)
    assert record["reporter"] != 2
    assert record["phase"] in ("rollout", "update")
    assert "rank 2 (host" in console
    assert "its process is stopped" in console


def test_a_hung_rank_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    code, console, record = LaunchedJob.of_mode(tmp_path, "hang_on_rank_1").end(limit_s=90)
    assert (code, record["rank"], record["phase"]) == (3, 1, "score")
    assert "has made no progress for" in console
    assert "in hang_on_rank_1" in console  # the stack


def test_usr1_stops_the_job_at_a_step_and_returns_75(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work", nproc=2)
    job.wait_for_phase("rollout", "update")
    os.kill(job.launcher.pid, signal.SIGUSR1)
    code, console, record = job.end()
    assert (code, record["code"], record["rank"]) == (75, 75, None)
    assert "stopped on request" in console


def test_term_ends_everything(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work_with_children", nproc=2)
    job.wait_for_phase("rollout", "update")
    os.kill(job.launcher.pid, signal.SIGTERM)
    code, console, record = job.end()
    assert (code, record["rank"]) == (3, None)
    assert "ended by SIGTERM to the launcher" in console


def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work_with_children", nproc=2)
    job.wait_for_phase("rollout", "update")
    job.torchrun().kill()
    code, console, record = job.end()
    assert code == record["code"] == 3
    assert "torchrun itself died with 137" in console


def test_a_bad_config_starts_nothing(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "finish", "job.progres_limit_s=3")
    assert job.launcher.wait(timeout=60) == 2
    console = job.output.read_text()
    assert "job.progres_limit_s" in console
    assert "progress_limit_s" in console.replace("progres_limit_s", "")  # the nearest valid key
    assert not job.run_folder.exists()


def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "work", nproc=1)
    job.wait_for_phase("rollout", "update")
    second = subprocess.run(
        ["scripts/launch.sh", "--module", "tests.dist.death_worker", tmp_path / "death.yaml"],
        cwd=REPO,
        env={**os.environ, "RLHF_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert second.returncode == 2
    assert "another job is at work in it" in second.stderr
    (job.run_folder / "stop").touch()
    assert job.end()[0] == 75


def test_two_hosts_are_one_job(tmp_path: Path) -> None:
    config = tmp_path / "death.yaml"
    config.write_text(CONFIG.format(nproc=2, folder=tmp_path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ["--rendezvous", f"127.0.0.1:{port}", "--module", "tests.dist.death_worker"]
    hosts = [
        subprocess.Popen(
            ["scripts/launch.sh", "--nnodes", "2", "--node-rank", str(host), *where, str(config)],
            cwd=REPO,
            env={**os.environ, "RLHF_PYTHON": sys.executable, "RLHF_TEST_MODE": "finish"},
        )
        for host in range(2)
    ]
    assert [host.wait(timeout=120) for host in hosts] == [0, 0]
    assert "hello of rank 1" in (tmp_path / "runs/death/logs/rank_1.log").read_text()


def test_a_wrong_number_of_ranks_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "death.yaml"
    config.write_text(CONFIG.format(nproc=4, folder=tmp_path))
    done = subprocess.run(
        ["scripts/launch.sh", "--nproc", "3", config],
        cwd=REPO,
        env={**os.environ, "RLHF_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "its pool is ranks 0..3, but the job has 3 ranks" in done.stderr
    assert not (tmp_path / "runs").exists()
