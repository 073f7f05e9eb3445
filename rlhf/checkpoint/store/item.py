"""One tensor as torch.save writes it, with its elements left out: what stands before and after them in the file.

A stored item is such an archive. Made once for a shape and dtype, by torch itself, so that elements go straight from
their memory to the file: not summed by torch (nothing reads its sums) and not copied on the way. The other way round,
an item whose first bytes are those has its elements right behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

import torch
from torch.serialization import skip_data


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a contiguous tensor's elements."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=4096)
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """What torch.save puts around a contiguous tensor of this shape and dtype, at least one element, on the CPU."""
    written = _Written()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], written))  # never touched, so it takes no memory
    assert len(written.runs) == 2, f"torch.save left out {len(written.runs) - 1} stretches of bytes for one tensor"
    head, tail = (b"".join(run) for run in written.runs)
    return Envelope(head, tail)


class _Written:
    """A file that can only be written, and skips ahead where elements would be."""

    def __init__(self) -> None:
        self.runs: list[list[bytes]] = [[]]

    def write(self, part: Sequence[int]) -> int:
        self.runs[-1].append(bytes(part))
        return len(part)

    def seek(self, offset: int, whence: int) -> None:
        self.runs.append([])

    def flush(self) -> None:
        pass
