"""The host processes of one engine on several hosts, from inside: each learns at once when another is gone, and ends.

Runs in host processes; no engine of a part of its schedulers is of use.
"""

import os
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from rlhf.rollout.sglang.life.board import write_end
from rlhf.rollout.sglang.multi_host.store import Line, StoreServer
from rlhf.rollout.sglang.wire import Party, Reply

LOOK_S = 0.2
"""How often a member looks at its schedulers."""


def lead(party: Party) -> None:
    """On the first host, before its schedulers start: serve the meeting, and end when a member is gone."""
    assert party.listening is not None, "the leader rank has opened it"
    listening = socket.socket(fileno=party.listening)
    StoreServer(listening, party.meeting.token, on_lost=lambda name, how: _end(f"{name}: {how or 'its host is gone'}"))


def follow(party: Party) -> Line:
    """On another host: join the leader's, and end when it is gone.

    Raises:
        OSError: It cannot be reached, or does not know the token.
    """
    meeting = party.meeting
    line = Line(meeting.address, meeting.port, meeting.token, name=party.titles[party.node])

    def attend() -> None:
        line.await_end()
        _end(f"{party.titles[0]}: its host is gone")

    threading.Thread(target=attend, name="rlhf-company", daemon=True).start()
    return line


def serve_member(engine: Any, channel: Connection, line: Line) -> NoReturn:
    """On another host, once its schedulers are ready: they take their work from the leader's; this one watches them.

    Ends with the rank that began it; where a scheduler ends, with a word of it to the leader's host.
    """
    while True:
        try:
            if channel.poll(LOOK_S):
                request = channel.recv()
                channel.send(Reply(request.number, error="the leader's host is to be asked"))
        except (EOFError, OSError):
            os._exit(0)  # the kernel ends the children
        for rank, pid in enumerate(engine.get_all_child_pids()):
            if (how := _how_ended(pid)) is not None:
                word = f"scheduler {rank} there (pid {pid}) {how}"
                line.last_word(word)
                _end(word)


def _how_ended(pid: int) -> str | None:
    """Of a child that stays as it is; None while it lives."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return "ended"
    if ended is None:
        return None
    return (
        f"left with {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"was ended by signal {ended.si_status}"
    )


def _end(why: str) -> NoReturn:
    """Leave word for the rank that watches."""
    write_end(os.getpid(), f"ended, for a part of its engine is lost: {why}")
    os._exit(1)
