"""Checksums of blocks of logical tensors, for proving after a transfer that both sides hold the same weights.

A checksum is the sum over elements of (bits of the element, mixed, x odd numbers made of the tensor's name and of each
coordinate of the element), mod 2^32. Those of disjoint blocks add up to that of their union, so the two sides may cut a
tensor as they like; and an element that is changed, or lies elsewhere, changes it. Knows no plan and no process group.

Numbers of 32 bits, not 64, because a float32 is then handled as it lies, without widening it.
"""

import hashlib
from functools import cache

import torch
from torch import Tensor

from rlhf.reshard.layout import Box

MODULUS = 2**32
"""Checksums are compared modulo this."""

CHUNK_ELEMENTS = 2**20
"""Elements that are mixed at a time: 4 MiB beside the block, near what a core's caches hold."""

_MIX_SHIFT = 16
"""Upper bits are also added to lower ones: alone, sign bits of two elements would cancel, whatever their places."""

_MIX_MASK = 2**16 - 1

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of SplitMix64's mixing function, as int64."""

_DIM_SALT = 0x1E3779B97F4A7C15
"""Keeps the numbers of different dims (at most 3) apart."""


def checksum(tensor: str, box: Box, block: Tensor) -> Tensor:
    """Checksum of one block, int64 [] in 0 .. MODULUS - 1 on the block's device; sums of them count modulo MODULUS.

    Args:
        tensor: Name of the logical tensor.
        box: The block's place in it.
        block: The elements, of the box's shape; any dtype and strides. It is read once.
    """
    assert tuple(block.shape) == box.shape, f"{tensor}: block {tuple(block.shape)} for box {box.spans}"
    words = max(1, block.dtype.itemsize // 4)  # an element of 8 bytes is two words, each with a place of its own
    spans = (*box.spans[:-1], (box.spans[-1][0] * words, box.spans[-1][1] * words))
    weights = [
        _place_weights(dim, 1 << (stop - 1).bit_length(), block.device)[start:stop]
        for dim, (start, stop) in enumerate(spans)
    ]
    total = torch.zeros((), dtype=torch.int32, device=block.device)
    rows = max(1, CHUNK_ELEMENTS * len(block) // max(1, block.numel()))
    for at in range(0, len(block), rows):
        bits = _words(block[at : at + rows])
        mixed = bits >> _MIX_SHIFT
        mixed &= _MIX_MASK  # the shift repeats the sign bit, and then inverted bits would be mixed to the same
        mixed ^= bits
        for dim in range(len(spans) - 1, 0, -1):
            mixed *= weights[dim]
            mixed = mixed.sum(-1, dtype=torch.int32)
        first = weights[0][at : at + rows] if len(spans) > 1 else weights[0][at * words : (at + rows) * words]
        total = total + (mixed * first).sum(dtype=torch.int32)
    return total.long() * _name_weight(tensor) % MODULUS


def _words(part: Tensor) -> Tensor:
    """The bits as int32, [.., n] or, of elements of 8 bytes, [.., 2n]."""
    if part.dtype.itemsize < 4:
        return part.contiguous().view(torch.int16 if part.dtype.itemsize == 2 else torch.uint8).int()
    return part.contiguous().view(torch.int32) if part.dtype.itemsize > 4 else part.view(torch.int32)


@cache
def _place_weights(dim: int, count: int, device: torch.device) -> Tensor:
    """An odd number for each index of a dim, int32 [count]. Kept: few sizes occur."""
    mixed = torch.arange(count, device=device) + _DIM_SALT * (dim + 1)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return (mixed ^ (mixed >> 31)).int() | 1


@cache
def _name_weight(tensor: str) -> int:
    """An odd 31-bit number of the tensor's own."""
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=4).digest(), "little") >> 1 | 1
