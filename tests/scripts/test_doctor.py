"""The doctor as a command: alone, and on four ranks behind two launchers, one of which was started differently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.launched import REPO, free_port

pytestmark = pytest.mark.dist


def test_alone_it_looks_at_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, REPO / "tools/doctor.py", "--run-folder", tmp_path / "runs/x"],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "nowhere0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error    network   GLOO_SOCKET_IFNAME=nowhere0 names no interface that is up" in done.stdout
    assert "patches fit" in done.stdout
    assert f"{tmp_path / 'runs'}: " in done.stdout
    assert not (tmp_path / "runs").exists()


def test_on_a_job_it_names_the_odd_node(tmp_path: Path) -> None:
    where = ["--nnodes", "2", "--nproc", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--doctor", str(tmp_path)]
    limited = ["bash", "-c", 'ulimit -Sn 300; exec "$@"', "bash"]  # too few for a job, enough for this one
    nodes = [
        subprocess.Popen(
            [*before, REPO / "scripts/launch.sh", "--node-rank", str(node), *where],
            cwd=tmp_path,
            env={**os.environ, "RLHF_PYTHON": sys.executable, **odd},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node, (before, odd) in enumerate([([], {}), (limited, {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/odd"})])
    ]
    shown = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2], shown
    table = shown[0]
    assert "doctor: 4 rank(s)" in table
    assert "error    limits    [ranks 2-3] 300 open files allowed" in table
    assert "(ranks 2-3): 300" in table
    assert "$NCCL_DEBUG differs: " in table
    assert "(ranks 2-3): INFO" in table
    assert "cannot see what rank 0 wrote" not in table
    assert "clock " not in table  # one machine, one clock
    assert not list((tmp_path / "doctor").glob("doctor_*"))
