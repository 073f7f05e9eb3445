"""64-bit checksums of blocks that add up, modulo 2^64, to that of the tensor, however it is cut.

The checksum of a tensor is the sum over its elements of

    name x place x mix(bits)        place = the product over the dims of an odd number for the index there

with an odd number of the tensor's name, all of them hashes of 64 bits. `bits` is the element as a signed integer; one
of 4 bytes is mixed (its upper half is added to its lower half, bit by bit, which can be undone), one of 8 bytes is two
of 4, side by side. What is found:

- A change of one element, whatever bits of it: always. Different bits have different mixes, less than 2^32 apart, and
  that times odd numbers is not 0 modulo 2^64.
- Any other change, such as two elements swapped, a block that lies elsewhere or is of an older version: unless numbers
  of 64 bits happen to cancel. For random numbers of the indices the chance is near 2^-(57 - t), where 2^t divides every
  difference of two mixes, old and new (7 bits go because numbers of rows and columns meet as products; 2^-(63 - t) for
  vectors). t is 0 as soon as one element differs in bit 0, or in bit 16 and not in bit 0. Where one and the same bit of
  several elements changes, such as signs, t is at most 15: 2^-42. It is more, up to 31, only where every element that
  changes at all changes its upper and its lower half alike.
- Nothing that somebody makes on purpose: the numbers are known.

Two sums of 32 bits, which would be quicker on CPUs, are as good at t = 0; at t = 15 each of them keeps 17 of its bits
and both together 34, where one of 64 keeps 49.

Knows no plan and no process group, and needs torch alone, so that an engine's process can sum what it holds.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from rlhf.reshard.bucket import split
from rlhf.reshard.layout import Box

CHUNK_ELEMENTS = {"cpu": 2**15}
"""Elements that are mixed at a time, by kind of device: on a CPU two numbers for each fit into a core's cache."""

DEVICE_CHUNK_ELEMENTS = 2**21
"""The same on every other device: 32 MiB of them, enough to fill it."""

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of SplitMix64's mixing function, as int64."""

_DIM_SALT = 0x1E3779B97F4A7C15
"""Keeps the numbers of different dims (at most 3) apart."""

Place = tuple[str, Box]
"""A logical tensor's name and a box of it."""

Block = tuple[str, Box, Tensor]
"""The same with the elements there, of the box's shape; any dtype, device and strides."""

Signed = tuple[int, Box, Tensor]
"""1 or -1, a box, and the elements there: -1 takes off what is held twice, so that it counts once."""


def sums_in(places: Sequence[Place], held: Callable[[str], Iterable[Signed]]) -> list[int]:
    """Checksum of all that is held inside each place, signed 64-bit numbers; 0 where nothing is.

    Local. `held` gives all blocks of a tensor that a rank or process holds, cut in any way; with sign 1 each, and with
    -1 the parts that another block holds too. The elements are read once, and nothing of a block's size is allocated.
    """
    found, blocks = [0] * len(places), []
    for at, (tensor, box) in enumerate(places):
        for sign, there, elements in held(tensor):
            common = box.intersect(there)
            if common is not None:
                blocks.append((at, sign, (tensor, common, elements[inside(there, common).slices])))
    for (at, sign, _), number in zip(blocks, checksums([block for *_, block in blocks]), strict=True):
        found[at] = wrapped(found[at] + sign * number)
    return found


def checksums(blocks: Sequence[Block]) -> list[int]:
    """Checksum of each block, signed 64-bit numbers; waits for their device once."""
    return torch.stack([checksum(*block) for block in blocks]).tolist() if blocks else []


def wrapped(total: int) -> int:
    """A sum of checksums as a signed 64-bit number: the same for sums that are equal modulo 2^64."""
    return (total + 2**63) % 2**64 - 2**63


def checksum(tensor: str, box: Box, block: Tensor) -> Tensor:
    """Checksum of one block, int64 [] on the block's device; sums of them wrap around.

    Args:
        tensor: Name of the logical tensor.
        box: The block's place in it.
        block: The elements, of the box's shape; any dtype and strides. It is read once.
    """
    assert tuple(block.shape) == box.shape, f"{tensor}: block {tuple(block.shape)} for box {box.spans}"
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    for part in split(box, CHUNK_ELEMENTS.get(block.device.type, DEVICE_CHUNK_ELEMENTS)):
        total += _sum(part, block[inside(box, part).slices])
    return total * _name_number(tensor)


def inside(box: Box, part: Box) -> Box:
    """Where a part of a box lies in a tensor that holds the box alone."""
    return part.shift(tuple(-start for start, _ in box.spans))


def _sum(box: Box, block: Tensor) -> Tensor:
    words = max(1, block.dtype.itemsize // 4)
    *outer, (start, stop) = box.spans
    mixed = _mixed(block).long()
    mixed *= _numbers(len(outer), stop * words, block.device)[start * words : stop * words]
    for dim, (first, end) in reversed(list(enumerate(outer))):
        mixed = mixed.sum(-1)
        mixed *= _numbers(dim, end, block.device)[first:end]
    return mixed.sum()


def _mixed(part: Tensor) -> Tensor:
    """The bits as signed integers, mixed where they are more than 16: [.., n] or, of elements of 8 bytes, [.., 2n]."""
    if part.dtype.itemsize < 4:
        return part.view(torch.int16 if part.dtype.itemsize == 2 else torch.int8)
    bits = part.view(torch.int32) if part.dtype.itemsize == 4 else part.contiguous().view(torch.int32)
    mixed = bits >> 16
    mixed &= 2**16 - 1  # the shift repeats the sign bit, and then inverted bits would be mixed to the same
    mixed ^= bits
    return mixed


def _numbers(dim: int, count: int, device: torch.device) -> Tensor:
    """An odd number for each of the first `count` indices of a dim, int64 [at least count]."""
    return _made(dim, 1 << (count - 1).bit_length(), device)


@cache
def _made(dim: int, count: int, device: torch.device) -> Tensor:
    """Kept: few sizes occur."""
    mixed = torch.arange(count, device=device) + _DIM_SALT * (dim + 1)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    return (mixed ^ (mixed >> 31)) | 1


@cache
def _name_number(tensor: str) -> int:
    """An odd number of the tensor's own, as int64."""
    return wrapped(int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little") | 1)
