"""A side of a comparison: a process that answers requests, one JSON object a line each way. Standard library only.

All sides stay alive while they are compared and take turns, so that what else the machine does hits all alike. While
it is not its turn a side is stopped, for some wait by spinning.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tools.benchmarks.measure import PeakMemory

_PR_SET_PDEATHSIG = 1
REPO = Path(__file__).resolve().parents[2]
START_LIMIT_S = 180.0
"""Longest start of a side: imports and loading."""
ANSWER_LIMIT_S = 600.0
"""Longest run."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one request; runs in the side's process."""


class SideError(RuntimeError):
    """A side that is not there, or that failed; says which and why."""


class Side:
    """The caller's end. Starting waits until the side is ready.

    Raises:
        SideError: On start or request: a library is missing, the process ended, or gave no answer in time.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, threads: int, folder: Path, env: Sequence[str] = ()
    ) -> None:
        """Start a command (which calls `serve`) in the repository's root, with its log in `folder`."""
        began = time.monotonic()
        self.name, self._log = name, folder / f"{name.replace(' ', '_')}.log"
        settings = [f"OMP_NUM_THREADS={threads}", "TOKENIZERS_PARALLELISM=false", "HF_HUB_OFFLINE=1", *env]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                ["env", *settings, *command],
                cwd=REPO,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._memory = PeakMemory(self._process.pid)
        self._memory.__enter__()
        try:
            self.versions: Mapping[str, str] = self._answer(START_LIMIT_S)["ready"]
        except SideError:
            self.close()
            raise
        self.start_s = time.monotonic() - began
        """From nothing until it was ready: imports, and loading."""
        self._signal(signal.SIGSTOP)

    def ask(self, **request: object) -> dict[str, Any]:
        """The side's answer to one request."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SideError(f"{self.name}: ended; the end of its log: {tail(self._log)}") from error
        answer = self._answer(ANSWER_LIMIT_S)
        self._signal(signal.SIGSTOP)
        return answer

    def peak_mib(self) -> int:
        """Most memory that its processes have taken so far."""
        return self._memory.look()

    def close(self) -> None:
        """End it and all that it started."""
        self._memory.__exit__(None, None, None)
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        """To its process group, which it leads."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        if not ready:
            raise SideError(f"{self.name}: no answer within {limit_s:g} s; the end of its log: {tail(self._log)}")
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.name}: ended; the end of its log: {tail(self._log)}")
        answer = json.loads(line)
        if "missing" in answer:
            raise SideError(f"{self.name}: not installed ({answer['missing']})")
        return answer


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:] or "(empty)"


def serve(start: Callable[[], tuple[Handler, Mapping[str, str]]]) -> None:
    """The side's end: start it, then answer requests until there are none.

    `start` imports and loads what is measured, and gives the handler and the versions of the libraries. What it
    prints goes to the log, for the answers have stdout to themselves. The process dies with the one that began it.
    """
    # A side is stopped most of the time, and would not see the end of its requests.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        handle, versions = start()
    except ImportError as error:
        _say(answers, {"missing": str(error)})
        return
    _say(answers, {"ready": dict(versions)})
    for line in sys.stdin:
        _say(answers, handle(json.loads(line)))


def _say(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
