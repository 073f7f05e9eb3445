"""The host processes of one engine on several hosts, from inside: each learns at once when another is gone, and ends.

Runs in host processes; no engine of a part of its schedulers is of use.
"""

import os
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from rlhf.errors import EngineError
from rlhf.rollout.sglang.life.board import write_end
from rlhf.rollout.sglang.life.watch import EngineWatch
from rlhf.rollout.sglang.multi_host.meeting import meeting_place
from rlhf.rollout.sglang.multi_host.nodes import WHERE
from rlhf.rollout.sglang.multi_host.store import Line, StoreServer
from rlhf.rollout.sglang.wire import Party, Reply

LOOK_S = 0.5
"""How often a member looks at its schedulers, and gives the leader's host a sign of life."""
WORD_S = 2.0
"""How long word of how a scheduler ended may take to come, once it is gone."""


def lead(party: Party) -> None:
    """On the first host, before its schedulers start: serve the meeting, and end when a member is gone."""
    assert party.listening is not None, "the leader rank has opened it"
    listening = socket.socket(fileno=party.listening)
    StoreServer(listening, party.meeting.token, on_lost=lambda name, how: _end(f"{name}: {how or 'its host is gone'}"))


def follow(party: Party) -> Line:
    """On another host: join the leader's, and end when it is gone.

    Raises:
        EngineError: It cannot be reached, or does not know the token.
    """
    meeting = party.meeting
    try:
        line = Line(meeting.address, meeting.port, meeting.token, name=party.titles[party.node])
    except OSError as error:
        raise EngineError(
            f"{WHERE}: {party.titles[party.node]} did not get through to the host process of {party.titles[0]} at "
            f"{meeting_place(meeting)} ({type(error).__name__}: {error}); needs an interface that leads to all hosts "
            "of the engine; set GLOO_SOCKET_IFNAME"
        ) from error

    def attend() -> None:
        line.await_end()
        _end(f"{party.titles[0]}: its host is gone")

    threading.Thread(target=attend, name="rlhf-company", daemon=True).start()
    return line


def serve_member(channel: Connection, line: Line) -> NoReturn:
    """On another host, once its schedulers are ready, which it tells its rank: watch them.

    They take their work from the leader's. It ends with the rank that began it, and where a scheduler ends or is
    stopped, with a word of it to the leader's host.
    """
    watch = EngineWatch(Path(tempfile.gettempdir()))
    line.beat()  # before its rank, and so anybody, takes the engine for ready
    channel.send(Reply(0))
    while True:
        try:
            if channel.poll(LOOK_S):
                request = channel.recv()
                channel.send(Reply(request.number, error="the leader's host is to be asked"))
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends the children
        line.beat()
        if fault := watch.fault(should_move=False):
            word = _how_exactly(watch, fault)
            line.last_word(word)
            _end(word)


def _how_exactly(watch: EngineWatch, fault: str) -> str:
    """How a process ended is known a moment after it has."""
    until = time.monotonic() + WORD_S
    while not (ended := watch.first_end()) and fault.endswith("died") and time.monotonic() < until:
        time.sleep(0.02)
    return ended or fault


def _end(why: str) -> NoReturn:
    """Leave word for the rank that watches."""
    write_end(os.getpid(), f"ended, for a part of its engine is lost: {why}")
    os._exit(1)
