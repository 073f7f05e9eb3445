"""A conversion that is ended from outside: nothing half-written stays, or it goes at the next start."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.checkpoint.convert.command import main

SLOW = """
import signal, sys, time
from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.command import console
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell begin without
HfWeights.read = lambda *_: time.sleep(60)
console()
"""
"""The command, at its first read for a minute."""

ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


@pytest.mark.dist
def test_a_signal_leaves_no_half_written_folder(models: Path, tmp_path: Path) -> None:
    jobs = {}
    for end in ENDS:
        out = tmp_path / end.name
        command = [sys.executable, "-W", "ignore", "-c", SLOW, "to-hf", str(models / "llama"), str(out)]
        jobs[end] = (subprocess.Popen(command), tmp_path / f".{end.name}.partial" / "model.safetensors")
    try:
        until = time.monotonic() + 60
        while not all(begun.exists() for _, begun in jobs.values()) and time.monotonic() < until:
            time.sleep(0.05)
        for end, (job, begun) in jobs.items():
            assert begun.exists()
            job.send_signal(end)
        for end, code in ENDS.items():
            assert jobs[end][0].wait(timeout=60) == code, end
    finally:
        for job, _ in jobs.values():
            job.kill()
    assert [path.name for path in tmp_path.iterdir()] == [".SIGKILL.partial"]
    assert main(["to-hf", str(models / "llama"), str(tmp_path / "SIGKILL")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["SIGKILL"]
