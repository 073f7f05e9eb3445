"""Elements of stored items into blocks: each item is read once, in stretches, and no more of it than is wanted."""

import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, cast

import torch
from torch import Tensor

from rlhf.checkpoint.store.file_plan import StoredItem, contiguous_parts
from rlhf.checkpoint.store.item import envelope
from rlhf.errors import DamagedError
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import inside
from rlhf.reshard.layout import Box

STRETCH_BYTES = 8 * 2**20
"""Read at a time when it does not go straight into its block."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of an item that a block wants."""

    block: Block
    common: Box
    """What item and block share, in the stored tensor's indices."""


class ItemReader:
    """Reads items of one data file.

    Local. Raises DamagedError, naming file and tensor, when the file is missing, cut short, or holds no such item.
    """

    def __init__(self, path: Path, room: Tensor) -> None:
        """`room` is host memory for STRETCH_BYTES, uint8."""
        self._path, self._room, self._memory = path, room, room.numpy().data
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedError(f"{path}: {error.strerror}; needs the data file that .metadata names") from error

    def __enter__(self) -> "ItemReader":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def read(self, item: StoredItem, wanted: Sequence[Wanted]) -> None:
        """Fill what the blocks want of an item."""
        start = self._elements_start(item)
        size = item.dtype.itemsize
        for part, at in _stretches(item.box, wanted, max(1, STRETCH_BYTES // size)):
            there, num_bytes = start + at * size, part.num_elements * size
            takers = [(one, common) for one in wanted if (common := one.common.intersect(part)) is not None]
            straight = _straight(takers, part, item.dtype)
            if straight is not None:
                self._fill(straight.numpy().data, there, item)
                continue
            self._fill(self._memory[:num_bytes], there, item)
            elements = self._room[:num_bytes].view(item.dtype).view(part.shape)
            for one, common in takers:
                target = one.block.data[inside(one.block.box, common).slices]
                target.copy_(elements[inside(part, common).slices])

    def _fill(self, memory: memoryview, start: int, item: StoredItem) -> None:
        filled = 0
        while filled < len(memory):
            got = os.preadv(self._handle, [memory[filled:]], start + filled)
            if got == 0:
                raise DamagedError(
                    f"{self._path}: ends {len(memory) - filled} bytes too early for {item.key}; needs all bytes that "
                    ".metadata names; the file was cut short"
                )
            filled += got

    def _elements_start(self, item: StoredItem) -> int:
        """The byte of the file where the item's first element lies."""
        head = envelope(item.box.shape, item.dtype).head
        found = os.pread(self._handle, len(head), item.start)
        return item.start + (len(head) if found == head else self._parsed_start(item))

    def _parsed_start(self, item: StoredItem) -> int:
        """The same for an item that another version of torch has written, in its own words."""
        try:
            tensor = torch.load(cast(IO[bytes], _Part(self._handle, item)), map_location="meta", weights_only=True)
        except (RuntimeError, UnpicklingError, EOFError, ValueError, LookupError, zipfile.BadZipFile) as error:
            said = next(iter(str(error).splitlines()), "it ends before it begins")
            raise DamagedError(
                f"{self._path}: no tensor at byte {item.start} for {item.key} ({said}); needs "
                "what torch.save writes; the file is damaged"
            ) from error
        fits = isinstance(tensor, Tensor) and (tuple(tensor.shape), tensor.dtype) == (item.box.shape, item.dtype)
        if not fits or not tensor.is_contiguous():
            raise DamagedError(
                f"{self._path}: {item.key} {item.box.spans} is {_said(tensor)} there; needs a contiguous tensor "
                f"{list(item.box.shape)} of {item.dtype}; .metadata and file do not belong together"
            )
        return tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * item.dtype.itemsize


def _said(found: object) -> str:
    return (
        f"a tensor {list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    )


def _stretches(box: Box, wanted: Sequence[Wanted], most: int) -> Iterator[tuple[Box, int]]:
    """(part of an item's box, number of its first element) of consecutive elements, without most that nobody wants."""
    first = 0
    for part in contiguous_parts(box, most):
        shared = [common for one in wanted if (common := one.common.intersect(part)) is not None]
        if shared:
            dim = next((dim for dim, extent in enumerate(part.shape) if extent > 1), None)
            yield (part, first) if dim is None else _trimmed(part, dim, shared, first)
        first += part.num_elements


def _trimmed(part: Box, dim: int, shared: Sequence[Box], first: int) -> tuple[Box, int]:
    """A part without the indices of its outermost dim, before and after, in which nothing is shared."""
    start, stop = part.spans[dim]
    low = min(common.spans[dim][0] for common in shared)
    high = max(common.spans[dim][1] for common in shared)
    step = part.num_elements // (stop - start)
    return Box((*part.spans[:dim], (low, high), *part.spans[dim + 1 :])), first + (low - start) * step


def _straight(takers: Sequence[tuple[Wanted, Box]], part: Box, dtype: torch.dtype) -> Tensor | None:
    """The memory that a part can be read into as it is, uint8; None when it must be copied from elsewhere."""
    if len(takers) != 1 or takers[0][1] != part:
        return None
    block = takers[0][0].block
    target = block.data[inside(block.box, part).slices].detach()
    if target.device.type != "cpu" or target.dtype != dtype or not target.is_contiguous():
        return None
    return target.reshape(-1).view(torch.uint8)


class _Part(io.RawIOBase):
    """An item's bytes as a file of their own."""

    def __init__(self, handle: int, item: StoredItem) -> None:
        self._handle, self._start, self._size, self._at = handle, item.start, item.num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(memory), max(0, self._size - self._at))
        got = os.preadv(self._handle, [memoryview(memory)[:wanted]], self._start + self._at)
        self._at += got
        return got
