"""Messages between a rank and its reward processes: a length, then a pickled tuple, over a socket pair."""

import pickle
import struct
from typing import Any

HEADER = struct.Struct("<I")


def packed(message: tuple[Any, ...]) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message)
    return HEADER.pack(len(body)) + body


class Inbox:
    """Bytes as they come in, given out as whole messages."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes that were read."""
        self.buffer += data

    def take(self) -> tuple[Any, ...] | None:
        """The next whole message (never None itself), or None while it is incomplete."""
        if len(self.buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
        if len(self.buffer) < end:
            return None
        body = bytes(self.buffer[HEADER.size : end])
        del self.buffer[:end]
        message: tuple[Any, ...] = pickle.loads(body)
        return message
