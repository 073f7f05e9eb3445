"""One rank's data file: blocks through host memory to the disk, summed on the way."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.store.disk_stream import DiskStream
from rlhf.checkpoint.store.file_plan import ALIGN_BYTES, Band, FilePlan, StoredItem, Window
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import checksums, inside, wrapped
from rlhf.reshard.layout import Box

PIECE_BYTES = 256 * 2**20
"""Of the host memory that holds a data file: a power of two."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that lies on the disk, flushed."""

    name: str
    """Relative to the checkpoint's folder."""
    size: int
    checksum: int
    """Of its bytes, `rlhf.checkpoint.store.file_sum`."""
    items: tuple[StoredItem, ...]
    """Empty when it is no data file."""
    sums: Mapping[str, int]
    """By stored tensor: checksum of the elements in this file, `rlhf.reshard.checksum`."""


class Room:
    """Host memory for a window at a time, placed so that elements of any dtype in it can be seen as such."""

    def __init__(self, plan: FilePlan) -> None:
        longest = max((window.stop - window.start for window in plan.windows), default=0)
        self._memory = torch.empty(longest + ALIGN_BYTES, dtype=torch.uint8)

    def of(self, window: Window) -> Tensor:
        """Memory for the window's bytes, uint8; that of the window before is used again."""
        return _placed(self._memory, window, 0)


class HostCopy:
    """Host memory that holds a whole data file, kept from save to save.

    In pieces, since an allocator of pinned memory, used where blocks lie on a GPU, rounds up to powers of two.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._places: dict[int, tuple[int, int]] = {}

    def take(self, plan: FilePlan, blocks: Sequence[Block]) -> None:
        """Copy the blocks' elements; returns when the blocks may change."""
        on_gpu = any(block.data.is_cuda for block in blocks)
        if self._pieces and on_gpu and not self._pieces[0].is_pinned():
            self._pieces = []
        self._places = _places(plan)
        while len(self._pieces) < 1 + max((piece for piece, _ in self._places.values()), default=-1):
            self._pieces.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu))
        for window in plan.windows:
            fill(window, blocks, self.of(window))
        if on_gpu:
            torch.cuda.synchronize()

    def of(self, window: Window) -> Tensor:
        """The window's bytes, uint8."""
        piece, at = self._places[window.start]
        return _placed(self._pieces[piece], window, at)


def _places(plan: FilePlan) -> dict[int, tuple[int, int]]:
    """For each window by its start: (number of the piece of memory, where in it)."""
    found, piece, at = {}, 0, 0
    for window in plan.windows:
        needs = (-(-(window.stop - window.start) // ALIGN_BYTES) + 1) * ALIGN_BYTES
        if at + needs > PIECE_BYTES:
            piece, at = piece + 1, 0
        found[window.start] = (piece, at)
        at += needs
    return found


def _placed(memory: Tensor, window: Window, at: int) -> Tensor:
    """Memory from `at` on, moved so that its place is that of the window in the file, modulo ALIGN_BYTES."""
    first = at + window.start % ALIGN_BYTES
    return memory[first : first + window.stop - window.start]


def write_data_file(folder: Path, name: str, plan: FilePlan, memory: Callable[[Window], Tensor]) -> WrittenFile:
    """Write and flush a data file that must not exist yet.

    Args:
        folder: The checkpoint's folder.
        name: Of the file.
        plan: What lies where in it.
        memory: Gives each window's bytes, uint8, in the order of windows; one at a time is used.

    Raises:
        OSError: The disk is full, the file exists, or it cannot be written.
    """
    sums = Counter[str]()
    with DiskStream(folder / name) as disk:
        for window in plan.windows:
            content = memory(window)
            for key, number in _sums_of(window, content):
                sums[key] += number
            disk.append(content)
    return WrittenFile(name, disk.size, disk.checksum, plan.items, {key: wrapped(sums[key]) for key in sums})


def streamed(plan: FilePlan, blocks: Sequence[Block]) -> Callable[[Window], Tensor]:
    """Each window's bytes, copied into the memory of one when they are asked for."""
    room = Room(plan)

    def content(window: Window) -> Tensor:
        memory = room.of(window)
        fill(window, blocks, memory)
        return memory

    return content


def fill(window: Window, blocks: Sequence[Block], memory: Tensor) -> None:
    """Put a window's bytes into memory, uint8 of its length; from a GPU, copies to pinned memory go on."""
    put_texts(window, memory)
    early = memory.is_pinned()
    for band in window.bands:
        block = blocks[band.block]
        source = block.data[inside(block.box, band.box).slices]
        elements(window, band, memory).copy_(source, non_blocking=early)


def put_texts(window: Window, memory: Tensor) -> None:
    """Put what is not an element into a window's memory."""
    numbers = memory.numpy()
    for start, text in window.texts:
        numbers[start - window.start : start - window.start + len(text)] = bytearray(text)


def elements(window: Window, band: Band, memory: Tensor) -> Tensor:
    """A band's elements, of its box's shape, as they lie in a window's memory."""
    at = band.start - window.start
    return memory[at : at + band.num_bytes].view(band.dtype).view(band.box.shape)


def state_sums(blocks: Sequence[tuple[str, Box, Tensor]]) -> list[int]:
    """Checksums of blocks of stored tensors; a tensor without dims counts as one of one element."""
    whole = Box(((0, 1),))
    return checksums([(key, box, data) if box.spans else (key, whole, data.view(1)) for key, box, data in blocks])


def _sums_of(window: Window, memory: Tensor) -> list[tuple[str, int]]:
    parts = [(band.key, band.box, elements(window, band, memory)) for band in window.bands]
    return [(key, number) for (key, *_), number in zip(parts, state_sums(parts), strict=True)]
