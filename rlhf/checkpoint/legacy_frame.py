"""A file of Megatron-LM's legacy format without its elements: torch writes the rest, and leaves room for them.

So a file of any size is made with a few MiB of memory: its elements are written to their places afterwards.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

from rlhf.checkpoint.file_sum import sum_at


class _Frame:
    """A file for torch.save: everything is written at its place and summed, elements are skipped."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._run = bytearray()  # what is to be written at `at`: torch writes many small parts
        self.at = 0
        self.sum = 0

    def write(self, part: Sequence[int]) -> int:
        self._run += bytes(part)
        return len(part)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, f"torch.save moved by whence {whence}"
        self.write_run()
        self.at += offset

    def flush(self) -> None:
        pass

    def write_run(self) -> None:
        if self._run:
            write_at(self._handle, memoryview(self._run), self.at)
            self.sum += sum_at(self.at, torch.frombuffer(self._run, dtype=torch.uint8))
            self.at += len(self._run)
            self._run = bytearray()


def write_frame(path: Path, entries: Mapping[str, Any]) -> tuple[int, int]:
    """Write a file that must not exist yet, as torch.save does; elements of its tensors are zeros so far.

    Args:
        path: The file.
        entries: What to save. Tensors must not have been touched, so that they take no memory.

    Returns:
        (bytes, checksum so far): sums of what is written to the elements' places add to it.

    Raises:
        OSError: The disk has no room for the file (seen here, not later), the file exists or cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        frame = _Frame(handle)
        with skip_data():
            torch.save(dict(entries), cast(IO[bytes], frame))
        frame.write_run()
        os.posix_fallocate(handle, 0, frame.at)
    finally:
        os.close(handle)
    return frame.at, frame.sum


def write_at(handle: int, content: memoryview, start: int) -> None:
    """Write all of it from a byte of the file on."""
    while content:
        done = os.pwrite(handle, content, start)
        content, start = content[done:], start + done
