"""Host processes of one engine on two hosts, without SGLang: a scheduler is a process that sleeps."""

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlhf.rollout.sglang.life.board import HOST, Pulse
from rlhf.rollout.sglang.multi_host.company import follow, lead, serve_member
from rlhf.rollout.sglang.wire import Order, Reply


@dataclass(frozen=True)
class Sleeps:
    """In the place of SGLang's engine on another host."""

    pid: int

    def get_all_child_pids(self) -> list[int]:
        return [self.pid]


def leads(fd: int) -> None:
    """Ready as soon as it serves the meeting; answers nothing."""
    channel = Connection(fd)
    order: Order = channel.recv()
    Pulse(HOST)
    assert order.party is not None
    lead(order.party)
    channel.send(Reply(0))
    threading.Event().wait()


def follows(fd: int) -> None:
    """Ready once it has joined; tells the pid of its scheduler when it is told to expect a request."""
    channel = Connection(fd)
    order: Order = channel.recv()
    Pulse(HOST)
    assert order.party is not None
    line = follow(order.party)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print(f"scheduler {child.pid} of {os.getpid()}", flush=True)
    channel.send(Reply(0))
    serve_member(Sleeps(child.pid), channel, line)
