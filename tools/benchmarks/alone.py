"""A job that is measured alone, from its start to its end: its log, its peak memory."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.benchmarks.measure import PeakMemory
from tools.benchmarks.side import REPO, SideError, tail

LIMIT_S = 1800.0
"""Longest job, including what a run prefix may wait for."""


def run_alone(name: str, command: Sequence[str], *, log: Path, prefix: Sequence[str] = ()) -> int:
    """Run a command in the repository's root; gives the most memory that its processes took, in MiB.

    Raises:
        SideError: It failed, or did not end within LIMIT_S.
    """
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*prefix, *command], cwd=REPO, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        with PeakMemory(process.pid) as memory:
            code = process.wait(timeout=LIMIT_S)
            peak_mib = memory.look()
    except subprocess.TimeoutExpired as error:
        raise SideError(f"{name}: did not end within {LIMIT_S:g} s; the end of its log: {tail(log)}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session, which it leads
        process.wait()
    if code:
        raise SideError(f"{name}: ended with code {code}; the end of its log: {tail(log)}")
    return peak_mib
