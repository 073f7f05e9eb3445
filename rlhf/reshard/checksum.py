"""Checksums of blocks of logical tensors, for proving after a transfer that both sides hold the same weights.

A checksum is the sum over elements of (bits of the element x an odd number made of the tensor's name and the element's
place), mod 2^64. Those of disjoint blocks add up to that of their union, so the two sides may cut a tensor as they
like; and an element that is changed, or lies elsewhere, changes it. Knows no plan and no process group.
"""

import hashlib
from functools import cache

import torch
from torch import Tensor

from rlhf.reshard.layout import Box

CHUNK_ELEMENTS = 2**20
"""Elements that are widened to int64 at a time: 8 MiB, near what a core's caches hold."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of SplitMix64's mixing function, as int64."""


def checksum(tensor: str, box: Box, block: Tensor) -> Tensor:
    """Checksum of one block, int64 [] on the block's device; sums of checksums wrap around like int64.

    Args:
        tensor: Name of the logical tensor.
        box: The block's place in it.
        block: The elements, of the box's shape; any dtype and strides. It is read once.
    """
    assert tuple(block.shape) == box.shape, f"{tensor}: block {tuple(block.shape)} for box {box.spans}"
    weights = [_place_weights(tensor, dim, span, block.device) for dim, span in enumerate(box.spans)]
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    rows = max(1, CHUNK_ELEMENTS * len(block) // max(1, block.numel()))
    for at in range(0, len(block), rows):
        bits = block[at : at + rows].contiguous().view(_BITS[block.dtype.itemsize]).long()
        for dim in range(bits.dim() - 1, 0, -1):
            bits = (bits * weights[dim]).sum(-1)
        total = total + (bits * weights[0][at : at + rows]).sum()
    return total


def _place_weights(tensor: str, dim: int, span: tuple[int, int], device: torch.device) -> Tensor:
    """An odd number for each index of a dim, int64 [stop - start]."""
    mixed = torch.arange(*span, device=device) + _salt(tensor, dim)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return (mixed ^ (mixed >> 31)) | 1


@cache
def _salt(tensor: str, dim: int) -> int:
    """A 62-bit number of its own for each dim of each tensor."""
    return int.from_bytes(hashlib.blake2b(f"{tensor}/{dim}".encode(), digest_size=8).digest(), "little") >> 2
