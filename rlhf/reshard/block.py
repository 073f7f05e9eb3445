"""Elements of a stored tensor, with their place in it: what is written to a checkpoint and read from one."""

from dataclasses import dataclass

from torch import Tensor

from rlhf.reshard.layout import Box


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a stored tensor and the memory that holds, or is to hold, its elements."""

    key: str
    """Name of the stored tensor."""
    shape: tuple[int, ...]
    """Of the whole stored tensor."""
    box: Box
    """In the stored tensor's indices."""
    data: Tensor
    """Of the box's shape, any strides and device: read when saving, written when loading."""
