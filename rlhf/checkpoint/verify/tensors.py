"""Two checkpoints of one model, tensor by tensor: same names, shapes, dtypes and bits. A few blocks are in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Wanted, Weights
from rlhf.checkpoint.convert.to_hf import rows_of
from rlhf.families.registry import logical_tensors
from rlhf.reshard.layout import Box

BATCH_BYTES = 128 * 2**20
"""Of one side that are in memory at a time: q, k and v of a layer are asked for together, for they may be stored so."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on both sides."""

    tensor: str
    what: str
    """In words, with both values."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison has seen, of all processes together."""

    num_tensors: int
    """Bit-equal or not, on both sides."""
    num_bytes: int
    """Of the first side's tensors that were compared bit by bit."""
    differences: tuple[Difference, ...]


_Place = tuple[str, Box]


def compare_tensors(first: Weights, second: Weights, crew: Crew, *, cast: str = "") -> Compared:
    """Compare every tensor of two checkpoints. Collective over the crew, whose processes share the work.

    Args:
        first: One side.
        second: The other.
        crew: The processes.
        cast: Name of a dtype: elements are compared after a cast of both sides to it. Empty compares bits, and another
            dtype is a difference.

    Raises:
        CheckpointError: A file of either side is damaged.
    """
    shapes = [{one.name: one.shape for one in logical_tensors(side.spec, head=side.head)} for side in (first, second)]
    differences, same = [], []
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        found = [side.get(name) for side in shapes]
        dtypes = [side.dtypes.get(name) for side in (first, second)]
        if found[0] != found[1]:
            differences.append(Difference(name, f"{_said(found[0])} against {_said(found[1])}"))
        elif dtypes[0] != dtypes[1] and not cast:
            differences.append(Difference(name, f"{dtypes[0]} against {dtypes[1]}".replace("torch.", "")))
        else:
            same.append(name)
    target = getattr(torch, cast) if cast else None
    kept = set(same)
    order = [name for name in first.dtypes if name in kept]
    batches = list(_batches([(name, shapes[0][name], first.dtypes[name].itemsize) for name in order]))
    mine = crew.share([sum(box.num_elements for _, box in batch) for batch in batches])
    counted = crew.together(
        lambda: [one for place in mine for one in _differing(first, second, batches[place], target)]
    )
    total: dict[str, _Count] = {}
    for name, count in [one for part in crew.all(counted) for one in part]:
        total[name] = total[name].plus(count) if name in total else count
    differences += [Difference(name, total[name].said()) for name in order if name in total]
    num_bytes = sum(box.num_elements * first.dtypes[name].itemsize for batch in batches for name, box in batch)
    return Compared(len(shapes[0].keys() & shapes[1].keys()), num_bytes, tuple(differences))


@dataclass(frozen=True, slots=True)
class _Count:
    number: int
    at: tuple[int, ...]
    """The first of them in its block."""
    values: tuple[float, float]
    most: float
    """Largest difference; nan where one side is not a number."""

    def plus(self, other: "_Count") -> "_Count":
        first = self if self.at <= other.at else other
        most = self.most if self.most >= other.most else other.most
        return _Count(self.number + other.number, first.at, first.values, most)

    def said(self) -> str:
        return (
            f"{self.number} element{'s differ' if self.number > 1 else ' differs'}, the first at {list(self.at)}: "
            f"{self.values[0]!r} against {self.values[1]!r}; largest difference {self.most:.3g}"
        )


def _differing(
    first: Weights, second: Weights, batch: Sequence[_Place], cast: torch.dtype | None
) -> Iterator[tuple[str, _Count]]:
    sides = []
    for weights in (first, second):
        blocks = [torch.empty(box.shape, dtype=weights.dtypes[name]) for name, box in batch]
        weights.read([Wanted(name, box, block) for (name, box), block in zip(batch, blocks, strict=True)])
        sides.append(blocks)
    for (name, box), ours, theirs in zip(batch, *sides, strict=True):
        a, b = (ours, theirs) if cast is None else (ours.to(cast), theirs.to(cast))
        if not torch.equal(bits(a), bits(b)):
            yield name, _count(box, a, b)


def _count(box: Box, a: Tensor, b: Tensor) -> _Count:
    places = (bits(a) != bits(b)).nonzero()
    at = tuple(places[0].tolist())
    most = (a.double() - b.double()).abs().max().item()
    offset = tuple(start + here for (start, _), here in zip(box.spans, at, strict=True))
    return _Count(len(places), offset, (a[at].item(), b[at].item()), most)


def bits(block: Tensor) -> Tensor:
    """A contiguous tensor's elements as integers of the same size, so that zeros of either sign and NaNs are told."""
    return block.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[block.dtype.itemsize])


def _batches(tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> Iterator[list[_Place]]:
    """Blocks in the order of the forward pass, together at most BATCH_BYTES."""
    batch, filled = list[_Place](), 0
    for name, shape, item_bytes in tensors:
        for box in rows_of(shape, item_bytes, BATCH_BYTES):
            size = box.num_elements * item_bytes
            if batch and filled + size > BATCH_BYTES:
                yield batch
                batch, filled = [], 0
            batch.append((name, box))
            filled += size
    if batch:
        yield batch


def _said(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"shape {list(shape)}"
