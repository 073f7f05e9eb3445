"""JSON messages, and one open file, between a rank and its scheduler: over a Unix socket without a name in any folder.

Whoever dies is seen at once by the other as the end of the stream, and leaves nothing behind.
"""

import json
import os
import select
import socket
import struct
import uuid
from collections.abc import Callable
from typing import Any

from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.life.patience import Patience

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
_SLICE_S = 0.2


class Channel:
    """One end of a connection; calls block.

    Raises:
        EngineLostError: The other end is gone.
    """

    def __init__(self, connected: socket.socket, *, peer: str) -> None:
        self._socket, self._peer = connected, peer

    def send(self, message: dict[str, Any]) -> None:
        """One message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise self._gone() from error

    def send_fd(self, fd: int) -> None:
        """An open file: the other end gets a descriptor of its own for it."""
        try:
            socket.send_fds(self._socket, [b"\0"], [fd])
        except OSError as error:
            raise self._gone() from error

    def receive(self, while_waiting: Callable[[], None] | None = None) -> dict[str, Any]:
        """The next message. `while_waiting` is called a few times a second; what it raises ends the wait."""
        while while_waiting is not None and not select.select([self._socket], [], [], _SLICE_S)[0]:
            while_waiting()
        found = json.loads(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))
        assert isinstance(found, dict), "a message is an object"
        return found

    def receive_fd(self) -> int:
        """The open file that comes after the last message."""
        try:
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise self._gone() from error
        if not fds:
            raise self._gone()
        return fds[0]

    def close(self) -> None:
        """The other end sees the end of the stream."""
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        into, at = bytearray(count), 0
        while at < count:
            try:
                got = self._socket.recv_into(memoryview(into)[at:])
            except OSError as error:
                raise self._gone() from error
            if not got:
                raise self._gone()
            at += got
        return into

    @property
    def pid(self) -> int:
        """Of the process that was at the other end when they met."""
        return _credentials(self._socket)[0]

    def _gone(self) -> EngineLostError:
        return EngineLostError(f"weight update: {self._peer} is gone; needs both ends alive; see its log")


class Door:
    """Where one peer of this user may knock, once, by name."""

    def __init__(self) -> None:
        self.name = f"rlhf-{uuid.uuid4().hex}"
        """Abstract: in no folder, gone with this process, and not to be guessed."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1)

    def open(self, *, peer: str, limit_s: float, while_waiting: Callable[[], None]) -> Channel:
        """The channel to the peer that knocks.

        Raises:
            EngineLostError: Nobody does within the limit. What `while_waiting`, called a few times a second, raises.
        """
        self._socket.settimeout(_SLICE_S)
        patience = Patience(limit_s)
        while not patience.is_over():
            while_waiting()
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                continue
            if _credentials(connected)[1] == os.getuid():
                connected.settimeout(None)
                return Channel(connected, peer=peer)
            connected.close()
        raise EngineLostError(f"weight update: {peer} did not connect within {limit_s:g} s; see the log of its engine")

    def close(self) -> None:
        """Nobody can knock any more; the open channel stays."""
        self._socket.close()


def knock(name: str, *, peer: str) -> Channel:
    """The channel to the process whose door has this name.

    Raises:
        EngineError: There is no such door.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect(f"\0{name}")
    except OSError as error:
        connected.close()
        raise EngineError(f"weight update: {peer} is gone; needs both ends alive; see its log") from error
    return Channel(connected, peer=peer)


def _credentials(connected: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
