"""One reward process as its rank sees it: started, fed, timed, killed, started again."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf.config.data import RewardConfig
from rlhf.reward.wire import Inbox, packed

START_LIMIT_S = 180.0
"""Importing a user's module, torch included, on a busy machine and a slow file system."""
GRACE_S = 1.0
"""The process ends itself at timeout_s and says where it hung; the rank kills it this much later if it did not."""
CLOSE_LIMIT_S = 0.5
"""A process whose socket has closed should be gone by then; if not, the function closed what is not its own."""

CHILD = (
    "import json, sys; path, fd, function, timeout_s, trace_fd = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from rlhf.reward.worker import main; main(fd, function, timeout_s, trace_fd)"
)


class RewardProcess:
    """A fresh interpreter (never a fork) that holds the reward function and answers one call at a time."""

    def __init__(self, config: RewardConfig, log_path: Path | None) -> None:
        self.config, self.log_path = config, log_path
        self.row: int | None = None
        self.ready = False
        self._start()

    def _start(self) -> None:
        self.trace = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.channel, theirs = socket.socketpair()
        self.inbox, self.outbox = Inbox(), memoryview(b"")
        fds = (theirs.fileno(), self.trace.fileno())
        told = json.dumps([sys.path, fds[0], self.config.function, self.config.timeout_s, fds[1]])
        with theirs, (self.log_path or Path(os.devnull)).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, told],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                process_group=0,  # so that what the function starts can be ended with it; the session stays the rank's
            )
        self.channel.setblocking(False)
        self.ready, self.deadline = False, time.monotonic() + START_LIMIT_S

    def restart(self) -> None:
        """End the process, hung or dead, and start a new one."""
        self.end()
        self._start()

    def submit(self, row: int, message: tuple[Any, ...]) -> None:
        """Hand out a row; its time begins now."""
        self.row, self.outbox = row, memoryview(packed(message))
        self.deadline = time.monotonic() + self.config.timeout_s + GRACE_S

    def send(self) -> None:
        """Write what the socket takes of the row; a dead process is noticed by receive."""
        try:
            self.outbox = self.outbox[self.channel.send(self.outbox) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.outbox = memoryview(b"")

    def receive(self) -> tuple[Any, ...] | None:
        """The next message, or None when there is none yet.

        Raises:
            EOFError: The process is dead.
        """
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self.inbox.feed(data)
        return self.inbox.take()

    def end(self) -> None:
        """Kill -9 the process and all that it started in its group."""
        with contextlib.suppress(ProcessLookupError):  # it and its group are gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()  # not before: until now its zombie kept the number from being given to another process
        self.channel.close()
        self.trace.close()
        self.row, self.ready = None, False

    def death(self) -> str:
        """Why a process that closed its socket without an answer did so; to be asked before end()."""
        end = time.monotonic() + CLOSE_LIMIT_S
        while (left := self._left()) is None and time.monotonic() < end:
            time.sleep(0.005)
        if left is None:
            return "the reward process closed its connection"
        place = hung_at(self._trace_text())
        if place:
            return f"no answer within {self.config.timeout_s:g} s; it was at {place}"
        how = "exit code" if left.si_code == os.CLD_EXITED else "signal"
        code = left.si_status if left.si_code == os.CLD_EXITED else signal.Signals(left.si_status).name
        return f"the reward process ended ({how} {code})"

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._left() is not None

    def _left(self) -> os.waitid_result | None:
        """How the process ended, leaving its zombie in place; None while it runs."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _trace_text(self) -> str:
        self.trace.seek(0)
        return self.trace.read().decode(errors="replace")


def hung_at(trace: str) -> str:
    """`file.py:line in function` from faulthandler's report (innermost call first), or nothing when it is empty.

    Names the innermost line of the reward function's own file: a place in a library says little to its author.
    """
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', trace)
    for at, (path, _, name) in enumerate(frames):
        if name == "guarded" and path.endswith("worker.py") and at > 0:
            frames = [frame for frame in frames[:at] if frame[0] == frames[at - 1][0]]
            break
    return f"{Path(frames[0][0]).name}:{frames[0][1]} in {frames[0][2]}" if frames else ""
