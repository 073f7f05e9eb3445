"""Two nodes that cannot see each other's processes, as on two hosts: what is told by marks, beats and records alone."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.scripts.launched import APART, LaunchedJob

can_part = subprocess.run([*APART, "true"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not can_part, reason="needs the right to make process namespaces (unshare --pid)"),
]


def test_deaths_and_ends_on_the_other_host_are_told(tmp_path: Path) -> None:
    jobs = {
        name: LaunchedJob.of_mode(tmp_path / name, "work_with_children", nproc=2, nodes=2, apart=True)
        for name in ("killed", "stopped", "host", "asked")
    }
    for job in jobs.values():
        job.wait_for_phase("rollout", "update", limit_s=150)
    jobs["killed"].signal_rank(1, signal.SIGKILL)
    jobs["stopped"].signal_rank(1, signal.SIGSTOP)
    jobs["host"].launchers[1].kill()  # and with it every process of its namespace
    inner = [p for p in jobs["asked"].seen if "rlhf.dist.launcher" in p.cmdline()]
    os.kill(inner[0].pid, signal.SIGUSR1)

    code, console, record = jobs["killed"].end(limit_s=120)
    assert (code, record["rank"]) == (3, 1), console
    assert "died without a traceback" in record["reason"]
    code, console, record = jobs["stopped"].end(limit_s=120)
    assert (code, record["rank"], record["reporter"]) == (3, 1, 0), console
    assert "has not moved for" in record["reason"]
    code, console, record = jobs["host"].end(limit_s=120, without=1)
    assert (code, record["rank"], record["reporter"]) == (3, 1, 0), console
    assert "has not moved for" in record["reason"]
    assert jobs["asked"].end(limit_s=120)[0] == 75
