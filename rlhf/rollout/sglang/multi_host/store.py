"""A store of torch's process groups that only those who know a token may speak to: for schedulers on several hosts.

torch's TCP store answers anybody. This one listens on one address, proves on both sides that the other knows the token
(HMAC-SHA-256 of fresh nonces) before a byte of anything else is read, and reads JSON, never pickles. What it guards is
who may take part; the bytes themselves pass in the clear, as those of gloo and NCCL do.

The server also holds a line to each other host of the engine: it is told when one is gone, or silent.
"""

import atexit
import base64
import contextlib
import hmac
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

HANDSHAKE_S = 20.0
"""Whoever has not proved by then that it knows the token is cut off."""
ANSWER_S = 60.0
"""How long a client waits for its part of that: the server's process may have its hands full, for it starts too."""
SILENT_LOOKS, LOOK_S = 15, 1.0
"""A member that has begun to beat is lost when so many looks in a row, so far apart, find no sign of life. They are
counted, so that what was stopped together with its members does not take them for lost."""
_NONCE, _PROOF = 32, 32
_SIZE = struct.Struct("<I")
_LONGEST = 1 << 24


class StoreServer:
    """Keys and values of one engine's groups, in the host process of its leader; threads of their own."""

    def __init__(self, listening: socket.socket, token: str, *, on_lost: Callable[[str, str], None]) -> None:
        """Serve until the process ends.

        Args:
            listening: Bound and listening.
            token: What clients must know.
            on_lost: Called with (name, its last word or "") when a member's line ends.
        """
        self._socket, self._token, self._on_lost = listening, token, on_lost
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        _in_background(self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            _in_background(lambda one=connected: self._serve(one))  # type: ignore[misc]  # a default

    def _serve(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError, ValueError):
            _prove(connected, self._token, is_server=True)
            while True:
                asked = _receive(connected)
                if asked["do"] == "join":
                    self._hold(connected, asked["name"])
                    return
                _send(connected, self._answer(asked))

    def _hold(self, connected: socket.socket, name: str) -> None:
        """A member's line: beats, if it gives any, until its last word, if it has the time for one."""
        word, limit = "", math.inf
        with contextlib.suppress(OSError, ValueError):
            _send(connected, {})
            silent = 0
            while not word:
                if not wait([connected], LOOK_S):
                    silent += 1
                    if silent >= limit:
                        word = f"its host has given no sign of life for {silent * LOOK_S:g} s: stopped, or cut off"
                    continue
                word, silent, limit = str(_receive(connected)["how"]), 0, SILENT_LOOKS
        self._on_lost(name, word)

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            verb, keys = asked["do"], asked["keys"]
            if verb == "wait":
                there = self._changed.wait_for(lambda: all(key in self._values for key in keys), asked["seconds"])
                return {"value": there}
            if verb == "check":
                return {"value": all(key in self._values for key in keys)}
            if verb == "count":
                return {"value": len(self._values)}
            (key,) = keys
            if verb == "get":
                there = self._changed.wait_for(lambda: key in self._values, asked["seconds"])
                return {"value": _text(self._values[key]) if there else None}
            if verb == "delete":
                return {"value": self._values.pop(key, None) is not None}
            if verb == "set":
                self._values[key] = _bytes(asked["value"])
            elif verb == "add":
                self._values[key] = str(int(self._values.get(key, b"0")) + asked["value"]).encode()
            elif verb == "swap":
                expected, value = _bytes(asked["expected"]), _bytes(asked["value"])
                if self._values.get(key, b"") == expected:
                    self._values[key] = value
            else:
                raise ValueError(f"unknown verb {verb!r}")
            self._changed.notify_all()
            found = self._values.get(key)
            return {"value": None if found is None else _text(found)}


class GuardedStore(dist.Store):
    """torch's view of a `StoreServer`; each thread has a connection of its own, for `get` and `wait` block.

    Raises:
        ConnectionError: The server is gone, or one side does not know the token.
        torch.distributed.DistStoreError: A key did not come in time.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        super().__init__()
        self._where, self._token = (address, port), token
        self._own = threading.local()
        atexit.register(self.close)  # and so it lives as long as the process: torch's groups hold its C++ part alone

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store; so with all the others."""
        self._ask("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:  # noqa: D102
        found = self._ask("get", [key], seconds=self._limit.total_seconds())
        if found is None:
            raise dist.DistStoreError(f"{key} did not come within {self._limit}")
        return _bytes(found)

    def add(self, key: str, value: int) -> int:  # noqa: D102
        return int(_bytes(self._ask("add", [key], value=value)))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:  # noqa: D102
        found = self._ask("swap", [key], expected=_text(expected), value=_text(value))
        return _bytes(_text(expected) if found is None else found)

    def check(self, keys: list[str]) -> bool:  # noqa: D102
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: D102
        limit = self._limit if timeout is None else timeout
        if not self._ask("wait", keys, seconds=limit.total_seconds()):
            raise dist.DistStoreError(f"{', '.join(keys)} did not come within {limit}")

    def delete_key(self, key: str) -> bool:  # noqa: D102
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:  # noqa: D102
        return int(self._ask("count", []))

    def clone(self) -> "GuardedStore":  # noqa: D102
        return GuardedStore(*self._where, self._token)

    def close(self) -> None:
        """Close this thread's connection."""
        connected = getattr(self._own, "connected", None)
        if connected is not None:
            connected.close()

    @property
    def _limit(self) -> timedelta:
        found: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stubs do without it
        return found

    def _ask(self, verb: str, keys: list[str], **more: Any) -> Any:
        connected = getattr(self._own, "connected", None)
        if connected is None:
            connected = self._own.connected = _connect(*self._where, self._token)
        _send(connected, {"do": verb, "keys": keys, **more})
        return _receive(connected)["value"]


class Line:
    """A member's line to the server: each end sees the other's end at once, or its host's within a minute.

    Once it has begun to beat, the server also sees that it is silent.
    """

    def __init__(self, address: str, port: int, token: str, *, name: str, patience_s: float = 300.0) -> None:
        """Join as `name`; the server may take `patience_s` to be there.

        Raises:
            OSError: It is not (ConnectionError: or one side does not know the token).
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                self._connected = _connect(address, port, token)
                break
            except (ConnectionRefusedError, TimeoutError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        _send(self._connected, {"do": "join", "name": name})
        _receive(self._connected)

    def await_end(self) -> None:
        """Returns when the server is gone."""
        with contextlib.suppress(OSError, ValueError):
            _receive(self._connected)

    def beat(self) -> None:
        """A sign of life; from the first one on the server waits for more."""
        self.last_word("")

    def last_word(self, how: str) -> None:
        """Say how this member ended."""
        with contextlib.suppress(OSError):
            _send(self._connected, {"how": how})


def _connect(address: str, port: int, token: str) -> socket.socket:
    connected = socket.create_connection((address, port), timeout=ANSWER_S)
    try:
        _prove(connected, token, is_server=False)
    except BaseException:
        connected.close()
        raise
    return connected


def _prove(connected: socket.socket, token: str, *, is_server: bool) -> None:
    """Both ends show that they know the token, which does not pass; the client first. Then the socket has no limit.

    Raises:
        ConnectionError: The other end does not.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.settimeout(HANDSHAKE_S if is_server else ANSWER_S)
    own = os.urandom(_NONCE)
    if is_server:
        connected.sendall(own)
        told = _read(connected, _NONCE + _PROOF)
        theirs, proof = told[:_NONCE], told[_NONCE:]
        if not hmac.compare_digest(proof, _proof(token, b"client", own, theirs)):
            raise ConnectionError("a client does not know the token of this engine")
        connected.sendall(_proof(token, b"server", own, theirs))
    else:
        theirs = _read(connected, _NONCE)
        connected.sendall(own + _proof(token, b"client", theirs, own))
        if not hmac.compare_digest(_read(connected, _PROOF), _proof(token, b"server", theirs, own)):
            raise ConnectionError("the server does not know the token of this engine")
    connected.settimeout(None)


def _proof(token: str, who: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(token.encode(), who + of_server + of_client, "sha256")


def _send(connected: socket.socket, message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()
    connected.sendall(_SIZE.pack(len(body)) + body)


def _receive(connected: socket.socket) -> dict[str, Any]:
    (size,) = _SIZE.unpack(_read(connected, _SIZE.size))
    if size > _LONGEST:
        raise ConnectionError(f"a message of {size} bytes; needs at most {_LONGEST}")
    found = json.loads(_read(connected, size))
    assert isinstance(found, dict), "a message is an object"
    return found


def _read(connected: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := connected.recv(count - len(found))):
            raise ConnectionError("the other end is gone")
        found += more
    return found


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rlhf-store", daemon=True).start()
