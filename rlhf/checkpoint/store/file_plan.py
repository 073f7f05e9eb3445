"""Where the blocks of one rank lie in its data file: items, and the windows in which they are copied and written.

Pure integers and headers, no element: a plan depends on keys, shapes, boxes and dtypes alone, so it is the same at
every save of a run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlhf.checkpoint.store.item import envelope
from rlhf.reshard.block import Block
from rlhf.reshard.layout import Box

ITEM_BYTES = 256 * 2**20
"""Upper size of a stored item: what a reader that takes whole items needs at a time."""

WINDOW_BYTES = 8 * 2**20
"""About what is copied, summed and written at a time: it fits into a cache."""

ALIGN_BYTES = 64
"""Items begin at multiples of it, and so do their elements (torch.save aligns them within an item)."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item of a data file: a box of a stored tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    start: int
    """First byte in the file."""
    num_bytes: int
    """With what torch.save writes around the elements."""


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive elements of an item: a box of a block."""

    block: int
    """Which of the blocks."""
    key: str
    dtype: torch.dtype
    box: Box
    """In the stored tensor's indices."""
    start: int
    """First byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the file."""

    start: int
    stop: int
    bands: tuple[Band, ...]
    texts: tuple[tuple[int, bytes], ...]
    """(first byte in the file, bytes) of what is not an element."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One data file."""

    items: tuple[StoredItem, ...]
    windows: tuple[Window, ...]
    size: int


def plan_file(blocks: Sequence[Block], *, item_bytes: int = ITEM_BYTES, window_bytes: int = WINDOW_BYTES) -> FilePlan:
    """Lay blocks out in a file in the order given; blocks without elements are left out."""
    items, pieces, at = [], list[Band | tuple[int, bytes]](), 0
    for number, block in enumerate(blocks):
        size = block.data.element_size()
        for box in contiguous_parts(block.box, max(1, item_bytes // size)):
            start = -(-at // ALIGN_BYTES) * ALIGN_BYTES
            around = envelope(box.shape, block.data.dtype)
            pieces.append((at, bytes(start - at) + around.head))
            at = start + len(around.head)
            for part in contiguous_parts(box, max(1, window_bytes // size)):
                pieces.append(Band(number, block.key, block.data.dtype, part, at, part.num_elements * size))
                at += part.num_elements * size
            pieces.append((at, around.tail))
            at += len(around.tail)
            items.append(StoredItem(block.key, block.shape, block.data.dtype, box, start, at - start))
    return FilePlan(tuple(items), tuple(_windows(pieces, at, window_bytes)), at)


def contiguous_parts(box: Box, most: int) -> list[Box]:
    """A box cut into boxes of at most `most` elements that follow one another in row-major order; [] when empty."""
    count = box.num_elements
    if count == 0:
        return []
    if count <= most:
        return [box]
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    start, stop = box.spans[dim]
    step = max(1, most // (count // (stop - start)))
    parts = []
    for low in range(start, stop, step):
        part = Box((*box.spans[:dim], (low, min(stop, low + step)), *box.spans[dim + 1 :]))
        parts += contiguous_parts(part, most)
    return parts


def _windows(pieces: Sequence[Band | tuple[int, bytes]], size: int, most: int) -> Iterator[Window]:
    bands, texts, start = list[Band](), list[tuple[int, bytes]](), 0
    for piece in pieces:
        here, there = (piece.start, piece.num_bytes) if isinstance(piece, Band) else (piece[0], len(piece[1]))
        if here > start and here + there - start > most:
            yield Window(start, here, tuple(bands), tuple(texts))
            bands, texts, start = [], [], here
        if isinstance(piece, Band):
            bands.append(piece)
        else:
            texts.append(piece)
    if size > start:
        yield Window(start, size, tuple(bands), tuple(texts))
