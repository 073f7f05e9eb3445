"""Every way a job ends, through scripts/launch.sh on one and on two nodes, with ranks that import torch alone.

Two nodes are two launchers on this machine that find each other by rendezvous. On two nodes rank 0 is on node 0.
"""

import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.scripts.launched import CONFIG, REPO, LaunchedJob, on_one_and_two_nodes

pytestmark = pytest.mark.dist


def test_a_good_job_ends_with_0_and_keeps_each_ranks_words(tmp_path: Path) -> None:
    for job in on_one_and_two_nodes(tmp_path, "finish"):
        code, console, record = job.end()
        assert (code, record["code"], record["rank"]) == (0, 0, None)
        assert console == "hello of rank 0\n"
        assert job.outputs[0].read_text() == console
        logs = [(job.run_folder / f"logs/rank_{rank}.log").read_text() for rank in range(2)]
        assert "raw words of rank 0" in logs[0]
        assert "hello of rank 1" in logs[1]
        assert "raw words of rank 1" in logs[1]


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
    for job in on_one_and_two_nodes(tmp_path, "raise_on_rank_1"):
        code, console, record = job.end()
        assert (code, record["rank"], record["phase"]) == (3, 1, "score")
        assert "no such thing on rank 1" in record["reason"]
        assert "[rank 1] KeyError: 'no such thing on rank 1'" in console
        assert console.count("[rank 1] Traceback") == 1
        assert "[rank 0]" not in console  # a consequence, kept in its log
        assert "launch: rank 1 failed" in job.outputs[0].read_text()  # node 0 tells it too, wherever it happened


def test_a_rank_that_cannot_read_a_dead_one_is_not_blamed(tmp_path: Path) -> None:
    for job in on_one_and_two_nodes(tmp_path, "read_of_the_dead"):
        code, console, record = job.end()
        assert (code, record["rank"]) == (3, 1), console


def test_a_killed_rank_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work_with_children", nproc=4)
    for job in jobs:
        job.wait_for_phase("rollout", "update")
        assert len(job.seen) >= job.nodes + 2 * job.nproc  # torchrun, the ranks, a child of each
        job.signal_rank(2, signal.SIGKILL)
    for job in jobs:
        code, console, record = job.end()
        assert (code, record["rank"]) == (3, 2)
        assert record["phase"] in ("rollout", "update")
        assert "rank 2 failed" in console
        assert "died without a traceback" in console


def test_a_stopped_rank_is_named_by_its_peers_and_killed(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work_with_children", nproc=4)
    for job in jobs:
        job.wait_for_phase("rollout", "update")
        job.signal_rank(2, signal.SIGSTOP)
    for job in jobs:
        code, console, record = job.end()
        assert (code, record["rank"]) == (3, 2)
        assert record["reporter"] != 2
        assert record["phase"] in ("rollout", "update")
        assert "rank 2 (host" in console
        assert "its process is stopped" in console


def test_a_hung_rank_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    for job in on_one_and_two_nodes(tmp_path, "hang_on_rank_1"):
        code, console, record = job.end(limit_s=90)
        assert (code, record["rank"], record["phase"]) == (3, 1, "score")
        assert "has made no progress for" in console
        assert " hang_on_rank_1" in console  # the line it stands at


def test_a_stop_request_ends_the_job_at_a_step_with_75(tmp_path: Path) -> None:
    jobs = [*on_one_and_two_nodes(tmp_path, "work"), LaunchedJob.of_mode(tmp_path / "file", "work", nproc=2, nodes=2)]
    for job in jobs:
        job.wait_for_phase("rollout", "update")
    for job in jobs[:2]:
        os.kill(job.launchers[-1].pid, signal.SIGUSR1)
    (jobs[2].run_folder / "stop").touch()
    for job in jobs:
        code, console, record = job.end()
        assert (code, record["code"], record["rank"]) == (75, 75, None)
        assert "stopped on request" in console


def test_a_signal_to_a_launcher_ends_everything(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work_with_children")
    jobs.append(LaunchedJob.of_mode(tmp_path / "int", "work_with_children", nproc=2, nodes=2))
    for job in jobs:
        job.wait_for_phase("rollout", "update")
    for job, number in zip(jobs, (signal.SIGHUP, signal.SIGTERM, signal.SIGINT), strict=True):
        os.kill(job.launchers[0 if number == signal.SIGINT else -1].pid, number)
    for job, name in zip(
        jobs, ("SIGHUP to the launcher", "SIGTERM to the launcher of node 1", "of node 0"), strict=True
    ):
        code, console, record = job.end()
        assert (code, record["rank"]) == (3, None)
        assert "ended by SIG" in console
        assert name in console


def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work_with_children")
    for job in jobs:
        job.wait_for_phase("rollout", "update")
        job.torchrun(job.nodes - 1).kill()
    alone, two = (job.end() for job in jobs)
    assert alone[0] == alone[2]["code"] == two[0] == two[2]["code"] == 3
    assert "torchrun itself died with 137" in alone[1]
    assert "torchrun itself of node 1 (host" in two[1]


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work_with_children")
    jobs.append(LaunchedJob.of_mode(tmp_path / "node_0", "work_with_children", nproc=2, nodes=2))
    victims = (0, 1, 0)
    for job, victim in zip(jobs, victims, strict=True):
        job.wait_for_phase("rollout", "update")
        job.launchers[victim].kill()
    jobs[0].launchers[0].wait()
    for job, victim in zip(jobs[1:], victims[1:], strict=True):
        code, console, record = job.end(without=victim)
        assert (code, record["code"]) == (3, 3)
        assert "launcher" in record["reason"]
        assert record["reason"] in console


def test_bad_input_ends_all_launchers_with_2(tmp_path: Path) -> None:
    before = on_one_and_two_nodes(tmp_path / "before", "finish", "job.progres_limit_s=3")
    inside = LaunchedJob.of_mode(tmp_path / "inside", "bad_data", nproc=2, nodes=2)
    for job in before:
        assert {launcher.wait(timeout=60) for launcher in job.launchers} == {2}
        assert "job.progres_limit_s" in job.console
        assert "progress_limit_s" in job.console.replace("progres_limit_s", "")  # the nearest valid key
        assert not job.run_folder.exists()
    code, console, record = inside.end()
    assert code == record["code"] == 2
    assert "rows.jsonl:3" in console


def test_a_second_job_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    jobs = on_one_and_two_nodes(tmp_path, "work")
    for job in jobs:
        job.wait_for_phase("rollout", "update")
    for job in jobs:
        second = tmp_path / "second.txt"
        assert job.start_node(job.nodes - 1, second).wait(timeout=60) == 2
        assert "another job is at work in it" in second.read_text()
        (job.run_folder / "stop").touch()
    assert [job.end()[0] for job in jobs] == [75, 75]


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
    assert "job size: 3 ranks, but pools reach beyond them (actor 0..3" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nnodes", "x"], "--nnodes: x given; needs a whole number"),
        (["--nnodes", "0"], "--nnodes: 0 given; needs at least 1"),
        (["--nproc", "a[$(touch made)]"], "--nproc: a[$(touch made)] given; needs a whole number"),
        (["--node-rank", "-1"], "--node-rank: -1 given; needs a whole number"),
        (["--nnodes", "2", "--rendezvous", "a:1", "--node-rank", "2"], "--node-rank: 2 given; needs 0..1 on 2 hosts"),
        (["--start-timeout", "0.5"], "--start-timeout: 0.5 given; needs a whole number"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    done = subprocess.run(
        [REPO / "scripts/launch.sh", *options, "--doctor", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "RLHF_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (2, f"launch: {says}\n")
    assert not list(tmp_path.iterdir())
