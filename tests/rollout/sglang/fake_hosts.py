"""Host processes without SGLang: each speaks to its leader rank as the real one does, up to a point."""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf.rollout.sglang.life import board
from rlhf.rollout.sglang.life.board import HOST, Pulse, read_entries, watch_children
from rlhf.rollout.sglang.wire import Answers, Ask, Beat, Reply, Response, pack_logprobs, pack_tokens, unpack_tokens


def answers(fd: int) -> None:
    """Does what its leader asks: echo, fail, slow (three signs of life, and the answer), hang, die, child."""
    channel = Connection(fd)
    channel.recv()
    channel.send(Reply(0))
    while True:
        request = channel.recv()
        if request.verb == "slow":
            for step in range(3):
                time.sleep(0.6)
                channel.send(Beat(step))
        if request.verb == "hang":
            time.sleep(3600)
        if request.verb == "die":
            print("the last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        error = "ValueError: as asked" if request.verb == "fail" else ""
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid if not error else 0
        channel.send(Reply(request.number, value=(request.arguments, child), error=error))


def samples(fd: int) -> None:
    """Answers each request after three more turns of 5 ms, at most four at a time; refuses prompts that begin with 99,
    and aborts those that begin with 98 by itself.

    The tokens count on from the last one that came; the log-prob of token t is -t. Half the tokens on an abort.
    """
    channel = Connection(fd)
    channel.recv()
    channel.send(Reply(0))
    waiting: list[Ask] = []
    running: list[tuple[int, Ask]] = []
    for turn in itertools.count():
        while waiting and len(running) < 4:
            running.append((turn + 3, waiting.pop(0)))
        while channel.poll(0.005 if running else 0.1):
            request = channel.recv()
            if request.verb == "sample":
                waiting += request.arguments[0]
            if request.verb == "abort":
                channel.send(Answers(tuple(_said(ask, 0.5) for _, ask in running)))
                channel.send(Answers(tuple(_said(ask, 0.0) for ask in waiting)))
                waiting, running = [], []
        ended = [ask for until, ask in running if until <= turn]
        running = [(until, ask) for until, ask in running if until > turn]
        if ended:
            channel.send(
                Answers(tuple(_said(ask, 0.5 if unpack_tokens(ask.prompt)[0] == 98 else 1.0) for ask in ended))
            )


def _said(ask: Ask, share: float) -> Response:
    came, wanted = unpack_tokens(ask.prompt + ask.begun), ask.sampling["max_new_tokens"]
    tokens = [came[-1] + 1 + i for i in range(int(wanted * share))]
    return Response(
        number=ask.number,
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs(-token for token in tokens),
        reason="length" if share == 1.0 else "abort",
        versions=(("4", len(tokens)),) if tokens else (),
        error="ValueError: as asked" if came[0] == 99 else "",
    )


def elsewhere(fd: int) -> None:
    """Says of each module whether its environment has it; once."""
    channel = Connection(fd)
    channel.recv()
    channel.send(Reply(0))
    request = channel.recv()
    found = [importlib.util.find_spec(name) is not None for name in request.arguments]
    channel.send(Reply(request.number, value=found))
    channel.poll(None)


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


ROLES = ("scheduler tp 0", "scheduler tp 1")
CHILD = """
import os, select, signal, sys, time
from rlhf.rollout.sglang.life.board import Pulse, write_raised
role, parent, sibling = sys.argv[1], os.getppid(), int(sys.argv[2])
pulse, moves = Pulse(role), True
def hang(*_):
    global moves
    moves = False
def work(*_):
    while True: pass
def wait(*_):
    pulse.await_others(True)
    hang()
signal.signal(signal.SIGUSR1, hang)
signal.signal(signal.SIGUSR2, work)
signal.signal(signal.SIGHUP, wait)
while os.getppid() == parent:
    if sibling < 0: time.sleep(0.05)
    elif select.select([sibling], [], [], 0.05)[0]:
        write_raised(RuntimeError("connection closed by peer"))
        sys.exit(1)
    if moves: pulse.beat()
"""
"""A process of an engine: its event loop goes round until SIGUSR1; from SIGUSR2 on it only computes, from
SIGHUP on it waits for others. It may have a sibling, and raises when that is gone."""


def with_children(fd: int) -> None:
    """Has the processes of an engine of two ranks; tp 0 raises when tp 1 is gone. Answers `echo`, and `nap` later."""
    channel = Connection(fd)
    channel.recv()
    pulse = Pulse(HOST)
    watch_children()
    sees, held = os.pipe()
    for role in ROLES:
        sibling, end = (sees, sees) if role == ROLES[0] else (-1, held)
        subprocess.Popen([sys.executable, "-c", CHILD, role, str(sibling)], pass_fds=(end,))
    os.close(held)
    folder = Path(os.environ["TMPDIR"])
    while sum(entry.pulse > 0 for entry in read_entries(folder)) < 2 or len(read_entries(folder)) <= len(ROLES):
        time.sleep(0.01)
    channel.send(Reply(0))
    while True:
        pulse.beat()
        if channel.poll(0.1):
            request = channel.recv()
            if request.verb == "nap":
                time.sleep(request.arguments[0])
            if request.verb in ("echo", "nap"):
                channel.send(Reply(request.number, value=request.arguments))


def with_children_under_load(fd: int) -> None:
    """The same, and this process gets around to its children's ends a third of a second late."""
    plain = board.write_end

    def late(*arguments: Any) -> None:
        time.sleep(0.3)
        plain(*arguments)

    board.write_end = late
    with_children(fd)


def dies_while_it_starts(fd: int) -> None:
    """Its scheduler is killed before it is ready; it says what SGLang says of that."""
    channel = Connection(fd)
    channel.recv()
    Pulse(HOST)
    watch_children()
    child = subprocess.Popen([sys.executable, "-c", CHILD, ROLES[0], "-1"])
    folder = Path(os.environ["TMPDIR"])
    while len(read_entries(folder)) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    child.kill()
    time.sleep(0.5)
    channel.send(Reply(0, error="RuntimeError: a scheduler died"))
    time.sleep(3600)
