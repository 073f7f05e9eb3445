"""Which part of a model one sync checks: everything, or a slice of every tensor, another each time.

A tensor is cut along its first dim into bands; they take turns, beginning with one that follows from the tensor's name.
So both sides of a transfer, and a process that knows no more than names and global shapes, come to the same elements,
and each slice holds about the same share of every rank's parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from zlib import crc32

from rlhf.reshard.layout import Box

SLICES = 20
"""Syncs until every element was checked: what is wrong and stays wrong is found within so many."""

BAND_ELEMENTS = 2**18
"""Least size of a band where its tensor has more: below, calls take longer than the sums."""

MAX_BANDS = 8 * SLICES
"""Most bands of a tensor: so that up to 8 ranks that share a tensor by rows have one of them in each slice."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One slice of a model; the `slices` of them are a partition of every tensor's elements."""

    number: int
    """0 .. slices - 1."""
    slices: int = SLICES

    def parts(self, tensor: str, shape: tuple[int, ...], box: Box) -> Iterator[Box]:
        """The blocks of a box of a logical tensor that belong to the slice. `shape` is the tensor's global one."""
        if self.slices == 1:
            yield box
            return
        rows = band_rows(shape)
        (start, stop), rest = box.spans[0], box.spans[1:]
        band = start // rows
        band += (self.number - crc32(tensor.encode()) - band) % self.slices
        while band * rows < stop:
            yield Box(((max(start, band * rows), min(stop, (band + 1) * rows)), *rest))
            band += self.slices


EVERYTHING = Turn(0, slices=1)
"""The whole model."""


def band_rows(shape: tuple[int, ...]) -> int:
    """Rows of a band of a tensor of this global shape; the last band may be shorter."""
    bands = min(MAX_BANDS, max(1, prod(shape) // BAND_ELEMENTS))
    return -(-shape[0] // bands)
