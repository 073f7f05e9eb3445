"""Starts that cannot be, on two nodes: every launcher that is there ends in time, with one code, and says why."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from rlhf.dist.nodes import read_mark
from tests.scripts.launched import LaunchedJob, free_port

pytestmark = pytest.mark.dist


def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    jobs = [LaunchedJob.of_mode(tmp_path / str(n), "finish", "--start-timeout=6", nodes=2, come=(n,)) for n in (0, 1)]
    for job, absent in zip(jobs, (1, 0), strict=True):
        code, console, record = job.end(limit_s=40)
        assert (code, record["code"]) == (3, 3)
        assert f"no sign of node {absent} of 2 within 6 s" in record["reason"]
        assert record["reason"] in console
        assert not (job.run_folder / "heartbeat").exists()  # no rank was started


def test_a_rank_that_never_begins_is_named(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "never_begins_on_node_1", "--start-timeout=25", nproc=2, nodes=2)
    code, console, record = job.end(limit_s=90)
    assert (code, record["rank"], record["phase"]) == (3, 1, "start")
    assert "rank 1 of node 1 (host" in record["reason"]
    assert "has not begun within" in console


def test_nodes_that_were_started_differently_do_not_start(tmp_path: Path) -> None:
    other = LaunchedJob.of_mode(tmp_path / "other", "finish", nproc=2, nodes=2, come=(0,))
    other.launchers.append(other.start_node(1, other.outputs[1], "job.alive_limit_s=9"))
    taken = socket.socket()
    taken.bind(("127.0.0.1", free_port()))
    taken.listen()
    rendezvous = f"127.0.0.1:{taken.getsockname()[1]}"
    busy = LaunchedJob.of_mode(tmp_path / "busy", "finish", nproc=2, nodes=2, rendezvous=rendezvous)
    unknown = LaunchedJob.of_mode(tmp_path / "who", "finish", nproc=2, nodes=2, rendezvous="no.such.host.invalid:29500")
    for job, says in (
        (other, "program: tests.dist.death_worker"),
        (busy, f"--rendezvous: {rendezvous} is of no use on node 0"),
        (unknown, "--rendezvous: no.such.host.invalid:29500 is of no use on node"),
    ):
        code, console, record = job.end(limit_s=40)
        assert (code, record["code"]) == (2, 2)
        assert says in record["reason"]
        assert all(says in output.read_text() for output in job.outputs), console
    assert "job.alive_limit_s=9 on node 1" in other.console
    taken.close()
    again = LaunchedJob.of_mode(tmp_path / "busy", "finish", nproc=2, nodes=2, rendezvous=rendezvous)
    assert again.end()[0] == 0  # the port is free now, and the marks of the job that failed are there


def test_a_launcher_that_waits_can_be_ended(tmp_path: Path) -> None:
    job = LaunchedJob.of_mode(tmp_path, "finish", nodes=2, come=(0,))
    until = time.monotonic() + 60
    while read_mark(job.run_folder, 0) is None:
        assert time.monotonic() < until, job.console
        time.sleep(0.1)
    os.kill(job.launcher.pid, signal.SIGTERM)
    code, console, record = job.end(limit_s=20)
    assert (code, record["code"]) == (3, 3)
    assert "ended by SIGTERM to the launcher of node 0" in console
    assert "before the job had started" in console
