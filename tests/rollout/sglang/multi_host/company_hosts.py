"""Host processes of one engine on two hosts, without SGLang: a scheduler is a process that sleeps."""

import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rlhf.rollout.sglang.life.board import HOST, Pulse, read_entries, watch_children
from rlhf.rollout.sglang.multi_host import store
from rlhf.rollout.sglang.multi_host.company import follow, lead, serve_member
from rlhf.rollout.sglang.wire import Order, Reply

SCHEDULER = (
    "import os; from rlhf.rollout.sglang.life.board import Pulse; from rlhf.rollout.sglang.life.parent import "
    "die_with_parent; die_with_parent(os.getppid()); Pulse('scheduler tp 1'); input()"
)


def leads(fd: int) -> None:
    """Ready as soon as it serves the meeting; answers nothing."""
    channel = Connection(fd)
    order: Order = channel.recv()
    Pulse(HOST)
    store.SILENT_LOOKS = 5
    assert order.party is not None
    lead(order.party)
    channel.send(Reply(0))
    threading.Event().wait()


def follows(fd: int) -> None:
    """Ready once it has joined and its scheduler lives, whose pid it prints."""
    channel = Connection(fd)
    order: Order = channel.recv()
    Pulse(HOST)
    watch_children()
    assert order.party is not None
    line = follow(order.party)
    child = subprocess.Popen([sys.executable, "-c", SCHEDULER], stdin=subprocess.PIPE)
    while len(read_entries(Path(tempfile.gettempdir()))) < 2:
        time.sleep(0.02)
    print(f"scheduler {child.pid}", flush=True)
    serve_member(channel, line)
