"""Bytes to a new file, in order, summed on the way, past the system's page cache where it can be passed by.

Written through the cache, a checkpoint drives out what other programs have there, and costs a copy and pages that are
not at hand: on our machine between a quarter and all of the disk's rate was left. Threads sum and write one buffer
while the next is filled. Where the file system takes no direct writes, they go through the cache.
"""

import errno
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from rlhf.checkpoint.store.file_sum import sum_at
from rlhf.reshard.checksum import wrapped

BUFFER_BYTES = 16 * 2**20
"""Of each of two buffers: a multiple of a disk's block, and of the rows of a file's checksum."""

BLOCK_BYTES = 4096
"""What direct writes are multiples of."""


class DiskStream:
    """A file that must not exist yet. To be used in a `with`; flushed to the disk when that ends without an error.

    Raises OSError when the file exists or the disk refuses, from whichever call notices.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct = _opened_direct(path)
        self._memory = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(2)]  # anonymous, on whole pages
        self._buffers = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checkpoint disk")
        self._under_way: tuple[Future[int], Future[None]] | None = None
        self._current, self._filled = 0, 0
        self.size = 0
        """Bytes so far."""
        self.checksum = 0
        """Of those written, `rlhf.checkpoint.store.file_sum`; of all after the end."""

    def append(self, part: Tensor) -> None:
        """Take over bytes, uint8 [N]; they may change when it returns."""
        at = 0
        while at < len(part):
            count = min(len(part) - at, BUFFER_BYTES - self._filled)
            self._buffers[self._current][self._filled : self._filled + count].copy_(part[at : at + count])
            at, self._filled, self.size = at + count, self._filled + count, self.size + count
            if self._filled == BUFFER_BYTES:
                self._hand_over()

    def __enter__(self) -> "DiskStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._hand_over()
                self._wait()
                os.fsync(self._handle)
        finally:
            self._threads.shutdown()  # whatever is under way still needs the handles
            os.close(self._handle)
            if self._direct is not None:
                os.close(self._direct)

    def _hand_over(self) -> None:
        """Let the threads sum and write what the current buffer holds, once they are done with the other."""
        self._wait()
        start, part = self.size - self._filled, self._buffers[self._current][: self._filled]
        writing = self._threads.submit(self._write, self._current, self._filled, start)
        self._under_way = (self._threads.submit(sum_at, start, part), writing)
        self._current, self._filled = 1 - self._current, 0

    def _wait(self) -> None:
        if self._under_way is not None:
            summing, writing = self._under_way
            self._under_way = None
            writing.result()
            self.checksum = wrapped(self.checksum + summing.result())

    def _write(self, number: int, count: int, start: int) -> None:
        if count == 0:
            return
        whole = -(-count // BLOCK_BYTES) * BLOCK_BYTES
        try:
            direct = self._direct is not None
            if self._direct is not None:
                self._write_all(self._direct, number, whole, start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct = False  # it may be opened that way, but not written
        if not direct:
            self._write_all(self._handle, number, count, start)
        elif whole != count:
            os.ftruncate(self._handle, start + count)

    def _write_all(self, handle: int, number: int, count: int, start: int) -> None:
        at = 0
        while at < count:  # a full disk takes a part first
            at += os.pwrite(handle, memoryview(self._memory[number])[at:count], start + at)


def _opened_direct(path: Path) -> int | None:
    """A second handle of a file, past the cache; None where there is no such thing."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
