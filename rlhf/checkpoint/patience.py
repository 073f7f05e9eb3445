"""Reads that are tried again: a disk or a file system that failed once has not damaged what lies on it."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.2, 1.0, 4.0)
"""Between the attempts."""
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What is proof: the file is not there. Other errors say that it could not be read, and nothing about its bytes."""


def patiently(read: Callable[[], T]) -> T:
    """What `read` gives, tried again for a few seconds while it fails.

    Raises:
        OSError: One of GONE at once, another when the last attempt failed too.
    """
    for pause_s in PAUSES_S:
        try:
            return read()
        except GONE:
            raise
        except OSError:
            time.sleep(pause_s)
    return read()
