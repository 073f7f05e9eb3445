"""A tensor whose elements lie in row-major order somewhere in a file, read block by block.

By reads, not through a mapping of the file: pages of a mapping count as memory of the process, up to the whole file.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlhf.errors import DamagedError

READ_BYTES = 8 * 2**20
"""Read at a time where elements do not go straight to where they are wanted; a longer row is read whole."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self, handle: int, box: tuple[slice, ...], into: Tensor, *, path: Path) -> None:
        """Copy a block, casting where the dtypes differ. Needs READ_BYTES of memory, or none.

        Args:
            handle: Of the open file.
            box: The block, with a start and a stop for each of at least one dim.
            into: CPU memory of the block's shape, any strides.
            path: Of the file, for a message.

        Raises:
            DamagedError: The file is too short.
        """
        rows, columns = box[0], box[1:]
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        whole = tuple((0, extent) for extent in self.shape[1:])
        is_whole = tuple((one.start, one.stop) for one in columns) == whole
        if is_whole and into.dtype is self.dtype and into.is_contiguous():
            self._fill(handle, into, rows.start * row_bytes, path)
            return
        step = max(1, READ_BYTES // max(1, row_bytes))
        room = torch.empty(min(step, rows.stop - rows.start), *self.shape[1:], dtype=self.dtype)
        for first in range(rows.start, rows.stop, step):
            stop = min(first + step, rows.stop)
            part = room[: stop - first]
            self._fill(handle, part, first * row_bytes, path)
            into[first - rows.start : stop - rows.start].copy_(part[(slice(None), *columns)])

    def _fill(self, handle: int, memory: Tensor, at: int, path: Path) -> None:
        room, done = memory.view(-1).view(torch.uint8).numpy().data, 0
        while done < len(room):
            got = os.preadv(handle, [room[done:]], self.start + at + done)
            if not got:
                end = self.start + at + done
                raise DamagedError(f"{path}: ends at byte {end}; needs the whole file; fetch it again")
            done += got
