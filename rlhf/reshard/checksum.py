"""64-bit checksums of blocks that add up, modulo 2^64, to that of the tensor, however it is cut.

Each row of a tensor is read as numbers z of 8 bytes, signed. The checksum is the sum over them of

    name x ((A[row] + B[place]) x z + (C[row] + D[place]) x (z >> 32))

with hashes of 64 bits, A and C odd, B and D even, of the row and of the number's place in it, and `name` an odd one of
the tensor's name. A vector is a row; of more than two dims, the earlier ones give one odd factor each. What is found:

- A change of one element of up to 4 bytes, whatever bits of it, and of one bit of any element: always. It changes
  either z alone, by less than 2^32, or z >> 32, by as little, and z by 2^32 times as much; both are multiplied by an
  odd number, which is not 0 modulo 2^64.
- Two elements swapped, or any other change: unless numbers of 64 bits happen to cancel. For random hashes the chance is
  2^-(63 - t), where 2^t divides all changes; of the lowest bits of 4 bytes t is 0, of signs alone it is 31.
- Not found: changes that add up to 0 in each row and in each column of numbers. The least such pattern are four
  elements at the corners of a rectangle, two that go up and two that go down by exactly the same.
- Nothing that somebody makes on purpose: the numbers are known.

The short form leaves the z >> 32 out, which halves the time. It still finds each change of one element, and of one bit,
always: A + B is odd. Of other changes the chance to miss is 2^-(63 - t) too, but where all of them are to the last of
two elements in a number (of four) t is 32 (48) more: two signs that flip there are missed. Samples are compared by it.

The forms are chosen for the speed of a CPU, where a verified sync should cost little more than reading: sums of 64-bit
numbers along rows and along columns run at the rate of memory, and what is multiplied is one number a row and one a
place. A factor of its own for each element, which would also tell rectangles, takes twice as long (torch has no vectors
of 64-bit products on CPUs); two sums of 32 bits would leave signs a chance of one in four.

Knows no plan and no process group, and needs torch alone, so that an engine's process can sum what it holds.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.reshard.layout import Box, Span

TILE_NUMBERS = {"cpu": 2**17}
"""Numbers of 8 bytes that are shifted at a time, by kind of device: 1 MiB, which fits into a core's cache."""

DEVICE_TILE_NUMBERS = 2**22
"""The same on every other device: 32 MiB, enough to fill it."""

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Of SplitMix64's mixing function, as int64."""

_SALT = 0x1E3779B97F4A7C15
"""Keeps the hashes of different roles apart."""

_ROW, _PLACE, _EARLIER = range(3)
"""Roles of hashes: A and C, B and D, factors of the first dim before the last two; of the next dim, 3, and so on."""

Place = tuple[str, Box]
"""A logical tensor's name and a box of it."""

Block = tuple[str, Box, Tensor]
"""The same with the elements there, of the box's shape; any dtype, device and strides."""

Weighted = tuple[int, Box, Tensor]
"""How often it counts, a box, and the elements there. See `twice` for what is held twice."""


def sums_in(places: Sequence[Place], held: Callable[[str], Iterable[Weighted]], *, brief: bool = False) -> list[int]:
    """Checksum of all that is held inside each place, signed 64-bit numbers; 0 where nothing is.

    Local. `held` gives all blocks of a tensor that a rank or process holds, cut in any way: once each, and `twice` for
    parts that are the repetition of another. No memory of a block's size is allocated.
    """
    found, blocks = [0] * len(places), []
    for at, (tensor, box) in enumerate(places):
        for times, there, elements in held(tensor):
            common = box.intersect(there)
            if common is not None:
                blocks.append((at, times, (tensor, common, elements[inside(there, common).slices])))
    numbers = checksums([block for *_, block in blocks], brief=brief)
    for (at, times, _), number in zip(blocks, numbers, strict=True):
        found[at] = wrapped(found[at] + times * number)
    return found


def twice(box: Box, first: Tensor, second: Tensor) -> tuple[Weighted, Weighted]:
    """What to add for a block that is held a second time, beside both blocks: equal elements then count once in all.

    So `first` counts -1 times and `second` 2 times; if either, or both alike, are wrong, the sum is too.
    """
    return (-2, box, first), (1, box, second)


def checksums(blocks: Sequence[Block], *, brief: bool = False) -> list[int]:
    """Checksum of each block, signed 64-bit numbers; waits for their device once.

    Elements may be of any dtype and strides, all on one device; each is read once. `brief` asks for the short form.
    """
    if not blocks:
        return []
    tiles = [(at, *tile) for at, (_, box, block) in enumerate(blocks) for tile in _cut(box, block)]
    sums = [0] * len(blocks)
    for (at, factor, _), number in zip(tiles, _sums([tile for *_, tile in tiles], brief=brief), strict=True):
        sums[at] += factor * number
    return [wrapped(total * _name_number(tensor)) for (tensor, _, _), total in zip(blocks, sums, strict=True)]


def wrapped(total: int) -> int:
    """A sum of checksums as a signed 64-bit number: the same for sums that are equal modulo 2^64."""
    return (total + 2**63) % 2**64 - 2**63


def checksum(tensor: str, box: Box, block: Tensor, *, brief: bool = False) -> int:
    """Checksum of one block: elements of the box's shape, at its place in the logical tensor of that name."""
    return checksums([(tensor, box, block)], brief=brief)[0]


def inside(box: Box, part: Box) -> Box:
    """Where a part of a box lies in a tensor that holds the box alone."""
    return part.shift(tuple(-start for start, _ in box.spans))


class _Tile(NamedTuple):
    """A part of a block that fits into a cache."""

    z: Tensor
    """int64 [R, P], its numbers."""
    row: int
    """Of the first number, in the logical tensor."""
    place: int
    """Of the first number in its row."""


def _cut(box: Box, block: Tensor) -> Iterator[tuple[int, _Tile]]:
    """The tiles of a block, each with the factor of its dims before the last two."""
    assert tuple(block.shape) == box.shape, f"reshard: block {tuple(block.shape)} for box {box.spans}"
    if len(box.spans) == 1:
        box, block = Box(((0, 1), *box.spans)), block[None]
    most = TILE_NUMBERS.get(block.device.type, DEVICE_TILE_NUMBERS)
    for factor, plane, spans in _planes(box, block):
        (top, _), (left, _) = spans
        for rows, columns in _tiles(spans, 8 // block.dtype.itemsize, most):
            is_all = (rows, columns) == spans
            part = plane if is_all else plane[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]
            z, place = _numbers(part, columns)
            yield factor, _Tile(z, rows[0], place)


def _planes(box: Box, block: Tensor) -> Iterator[tuple[int, Tensor, tuple[Span, Span]]]:
    """(factor, elements, their rows and columns) for each index of the dims before the last two."""
    *earlier, rows, columns = box.spans
    for at in product(*(range(start, stop) for start, stop in earlier)):
        factor, plane = 1, block
        for dim, index in enumerate(at):
            factor = wrapped(factor * int(_hashes(_EARLIER + dim, index, index + 1, torch.device("cpu"))[0]))
            plane = plane[index - earlier[dim][0]]
        yield factor, plane, (rows, columns)


def _tiles(spans: tuple[Span, Span], each: int, most: int) -> Iterator[tuple[Span, Span]]:
    """(rows, columns) of blocks of at most `most` numbers of `each` elements; columns are cut between numbers."""
    (top, bottom), (left, right) = spans
    while left < right:
        high = min(right, (left // each + most) * each)
        step = max(1, most // (-(-high // each) - left // each))
        yield from (((at, min(bottom, at + step)), (left, high)) for at in range(top, bottom, step))
        left = high


def _numbers(part: Tensor, columns: Span) -> tuple[Tensor, int]:
    """A block as numbers of 8 bytes, int64 [R, P], and the place of the first; 0 in bytes that are outside it."""
    size = part.dtype.itemsize
    each, (left, right) = 8 // size, columns
    first, end = left // each, -(-right // each)
    is_whole = (left % each, right % each, part.data_ptr() % 8, part.stride(0) * size % 8) == (0, 0, 0, 0)
    if is_whole and part.stride(1) == 1:
        return part.view(torch.int64), first
    padded = torch.zeros(len(part), (end - first) * each, dtype=part.dtype, device=part.device)
    padded[:, left - first * each : right - first * each] = part
    return padded.view(torch.int64), first


def _sums(tiles: Sequence[_Tile], *, brief: bool) -> list[int]:
    """Of each tile, without its factors."""
    # Few calls, since blocks of a sample are so small that calls take as long as the sums: all products are one, and
    # the sum of a tile's, modulo 2^64, is a difference of running sums.
    device, halves = tiles[0].z.device, 1 if brief else 2
    ends = list(accumulate(halves * sum(tile.z.shape) for tile in tiles))
    sums = torch.empty(ends[-1], dtype=torch.int64, device=device)
    # For what is shifted: fresh memory for each tile would take longer than all sums.
    room = None if brief else torch.empty(max(tile.z.numel() for tile in tiles), dtype=torch.int64, device=device)
    at = 0
    for z, _, _ in tiles:
        rows, places = z.shape
        halved = [z] if room is None else [z, torch.bitwise_right_shift(z, 32, out=room[: z.numel()].view(z.shape))]
        for numbers in halved:
            torch.sum(numbers, 1, out=sums[at : at + rows])
            torch.sum(numbers, 0, out=sums[at + rows : at + rows + places])
            at += rows + places
    factors = [_factors(row, z.shape[0], place, z.shape[1], device, halves) for z, row, place in tiles]
    running = sums.mul_(torch.cat(factors)).cumsum_(0)[torch.tensor(ends, device=device) - 1].tolist()
    return [total - before for before, total in pairwise([0, *running])]


@lru_cache(maxsize=1024)
def _factors(row: int, rows: int, place: int, places: int, device: torch.device, halves: int) -> Tensor:
    """A and B of a tile, then C and D if asked. Kept: layers are alike; one takes a hundredth of its tile."""
    of_rows, of_places = _hashes(_ROW, row, row + rows, device), _hashes(_PLACE, place, place + places, device)
    return torch.cat([of[half] for half in range(halves) for of in (of_rows, of_places)])


def _hashes(role: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Of some indices of a dim, for a number and for its upper half, int64 [2, stop - start]."""
    return _made(role, 1 << (stop - 1).bit_length(), device)[:, start:stop]


@cache
def _made(role: int, count: int, device: torch.device) -> Tensor:
    """Kept: few sizes occur."""
    mixed = torch.arange(count, device=device) + _SALT * torch.tensor([[2 * role + 1], [2 * role + 2]], device=device)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * multiplier
    mixed ^= mixed >> 31
    return mixed << 1 if role == _PLACE else mixed | 1


@cache
def _name_number(tensor: str) -> int:
    """An odd number of the tensor's own, as int64."""
    return wrapped(int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little") | 1)
