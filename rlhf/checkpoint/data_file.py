"""One rank's data file: blocks through host memory to the disk, summed on the way."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.disk_stream import DiskStream
from rlhf.checkpoint.file_plan import FilePlan, StoredItem, Window
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import checksums, inside, wrapped
from rlhf.reshard.layout import Box


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that lies on the disk, flushed."""

    name: str
    """Relative to the checkpoint's folder."""
    size: int
    checksum: int
    """Of its bytes, `rlhf.checkpoint.file_sum`."""
    items: tuple[StoredItem, ...]
    """Empty when it is no data file."""
    sums: Mapping[str, int]
    """By stored tensor: checksum of the elements in this file, `rlhf.reshard.checksum`."""


class HostCopy:
    """Host memory that holds a whole data file, kept from save to save.

    Pinned where blocks lie on a GPU, so that they are copied while others still are.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, plan: FilePlan, blocks: Sequence[Block]) -> None:
        """Copy the blocks' elements; returns when the blocks may change."""
        on_gpu = any(block.data.is_cuda for block in blocks)
        if len(self._memory) < plan.size or (on_gpu and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one is given back first
            self._memory = torch.empty(plan.size, dtype=torch.uint8, pin_memory=on_gpu)
        for window in plan.windows:
            fill(window, blocks, self.of(window))
        if on_gpu:
            torch.cuda.synchronize()

    def of(self, window: Window) -> Tensor:
        """The window's bytes, uint8."""
        return self._memory[window.start : window.stop]


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


def fill(window: Window, blocks: Sequence[Block], memory: Tensor) -> None:
    """Put a window's bytes into memory, uint8 of its length; from a GPU copies to pinned memory go on."""
    early = memory.is_pinned()
    numbers = memory.numpy()
    for start, text in window.texts:
        numbers[start - window.start : start - window.start + len(text)] = bytearray(text)
    for band in window.bands:
        block = blocks[band.block]
        source = block.data[inside(block.box, band.box).slices]
        _elements(memory, band.start - window.start, source.dtype, band.box).copy_(source, non_blocking=early)


def streamed(plan: FilePlan, blocks: Sequence[Block]) -> Callable[[Window], Tensor]:
    """Each window's bytes, copied into one small memory when they are asked for."""
    memory = torch.empty(max((one.stop - one.start for one in plan.windows), default=0), dtype=torch.uint8)

    def content(window: Window) -> Tensor:
        part = memory[: window.stop - window.start]
        fill(window, blocks, part)
        return part

    return content


def state_sums(blocks: Sequence[tuple[str, Box, Tensor]]) -> list[int]:
    """Checksums of blocks of stored tensors; a tensor without dims counts as one of one element."""
    whole = Box(((0, 1),))
    return checksums([(key, box, data) if box.spans else (key, whole, data.view(1)) for key, box, data in blocks])


def _sums_of(window: Window, content: Tensor) -> list[tuple[str, int]]:
    parts = [
        (band.key, band.box, _elements(content, band.start - window.start, band.dtype, band.box))
        for band in window.bands
    ]
    return [(key, number) for (key, *_), number in zip(parts, state_sums(parts), strict=True)]


def _elements(memory: Tensor, start: int, dtype: torch.dtype, box: Box) -> Tensor:
    """Elements that lie at a byte of memory."""
    return memory[start : start + box.num_elements * dtype.itemsize].view(dtype).view(box.shape)
