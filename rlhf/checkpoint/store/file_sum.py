"""64-bit checksum of a file's bytes that adds up over parts: whoever has some of the bytes sums those.

The numbers of `rlhf.reshard.checksum`, with the file as rows of 64 KiB: a change of one byte is always found, at the
rate at which memory is read (faster than zlib's CRC of 32 bits on the CPUs we measured). Zeros at the end do not count,
so a file is known by its size and its checksum.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from rlhf.reshard.checksum import checksums, wrapped
from rlhf.reshard.layout import Box

READ_BYTES = 8 * 2**20
"""Read at a time: long enough for a disk, short enough to be summed out of a cache."""

_ROW_BYTES = 65536
_NAME = "bytes of a file"


def sum_at(start: int, part: Tensor) -> int:
    """Checksum of some of a file's bytes, signed 64 bits.

    Args:
        start: Where in the file they lie.
        part: uint8 [N], contiguous; summed fastest when its address and `start` are alike modulo 8.
    """
    blocks, at, end = [], start, start + len(part)
    while at < end:
        row, column = divmod(at, _ROW_BYTES)
        whole_rows = (end - at) // _ROW_BYTES if column == 0 else 0
        rows = (row, row + max(1, whole_rows))
        columns = (0, _ROW_BYTES) if whole_rows else (column, min(_ROW_BYTES, column + end - at))
        box = Box((rows, columns))
        blocks.append((_NAME, box, part[at - start : at - start + box.num_elements].view(box.shape)))
        at += box.num_elements
    return wrapped(sum(checksums(blocks)))


def sum_of_file(path: Path, *, tick: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """(bytes, checksum) of a file as it is; reads all of it through two buffers, one while the other is summed.

    `tick` is called for each piece that was read.

    Raises:
        OSError: It cannot be read.
    """
    size, total = 0, 0
    rooms = [torch.empty(READ_BYTES, dtype=torch.uint8) for _ in range(2)]
    handle = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint disk") as thread:
            filled, number = _fill(handle, rooms[0], 0), 0
            while filled:
                ahead = thread.submit(_fill, handle, rooms[1 - number], size + filled) if filled == READ_BYTES else None
                total += sum_at(size, rooms[number][:filled])
                size += filled
                tick()
                filled, number = (0 if ahead is None else ahead.result()), 1 - number
    finally:
        os.close(handle)
    return size, wrapped(total)


def _fill(handle: int, room: Tensor, start: int) -> int:
    """Bytes read from `start` on: as many as there is room for, fewer at the end of the file."""
    memory, filled = room.numpy().data, 0
    while filled < len(memory) and (got := os.preadv(handle, [memory[filled:]], start + filled)):
        filled += got
    return filled
