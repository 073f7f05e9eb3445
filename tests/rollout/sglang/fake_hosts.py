"""Host processes without SGLang: each speaks to its leader rank as the real one does, up to a point."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from rlhf.rollout.sglang.wire import Progress, Reply


def answers(fd: int) -> None:
    """Does what its leader asks: echo, fail, slow (three signs of life, then the answer), hang, die, child."""
    channel = Connection(fd)
    channel.recv()
    channel.send(Reply(0))
    while True:
        request = channel.recv()
        if request.verb == "slow":
            for step in range(3):
                time.sleep(0.6)
                channel.send(Progress(request.number, step, 3))
        if request.verb == "hang":
            time.sleep(3600)
        if request.verb == "die":
            print("the last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        error = "ValueError: as asked" if request.verb == "fail" else ""
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid if not error else 0
        channel.send(Reply(request.number, value=(request.arguments, child), error=error))


def never_ready(fd: int) -> None:
    """Reads its order and says nothing."""
    channel = Connection(fd)
    channel.recv()
    time.sleep(3600)


def refuses(fd: int) -> None:
    """Says why it cannot start."""
    channel = Connection(fd)
    channel.recv()
    channel.send(Reply(0, error="RuntimeError: no such model"))


def crashes(fd: int) -> None:
    """Ends before it has said anything."""
    raise SystemExit("a broken import")
