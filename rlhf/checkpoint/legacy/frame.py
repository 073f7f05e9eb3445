"""What torch.save writes around the elements of a file's tensors: made by torch itself, without any element.

So a file of any size is written in order with a few MiB of memory: a text, a tensor's elements, the next text.
"""

import os
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data


class _Texts:
    """A file that can only be written, and skips ahead where elements would be."""

    def __init__(self) -> None:
        self.texts: list[bytearray] = [bytearray()]
        self.gaps: list[int] = []

    def write(self, part: Sequence[int]) -> int:
        self.texts[-1] += bytes(part)
        return len(part)

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, f"torch.save moved by whence {whence}"
        self.texts.append(bytearray())
        self.gaps.append(offset)

    def flush(self) -> None:
        pass


def frame_of(entries: Mapping[str, Any], num_bytes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The texts, uint8 [N] each: before the first tensor's elements, between each two tensors', and after the last's.

    Args:
        entries: What is saved. Its tensors are not looked at, so ones that were never touched take no memory.
        num_bytes: Of each tensor's elements, in the order in which the tensors come in `entries`; none is empty.
    """
    written = _Texts()
    with skip_data():
        torch.save(dict(entries), cast(IO[bytes], written))
    assert written.gaps == list(num_bytes), f"torch.save left out {written.gaps}, not {list(num_bytes)}"
    return tuple(torch.frombuffer(text, dtype=torch.uint8) for text in written.texts)
