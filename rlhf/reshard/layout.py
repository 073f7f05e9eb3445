"""What ranks hold of a model: which box of which logical tensor lies where in which local parameter.

A layout is pure data: no tensor, no process group. Both sides of a transfer describe themselves this way, so the
planner needs no name mapping and no knowledge of any model or library.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache

ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element by name of dtype, as `ModelLayout.dtype` spells it."""

Span = tuple[int, int]
"""Half-open range of indices along one dim."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of indices: one span per dim."""

    spans: tuple[Span, ...]

    @staticmethod
    def of(*spans: Span) -> "Box":
        """Box from its spans."""
        return Box(tuple(spans))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each dim."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def num_elements(self) -> int:
        """Elements inside; 0 when any span is empty."""
        count = 1
        for start, stop in self.spans:
            count *= stop - start
        return count

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index for a tensor of the space that the box lies in."""
        return tuple(slice(start, stop) for start, stop in self.spans)

    def intersect(self, other: "Box") -> "Box | None":
        """The common block, or None when they share no element."""
        spans = []  # a loop, since planners ask this more often than anything else
        for (a, b), (c, d) in zip(self.spans, other.spans, strict=True):
            start, stop = (a if a > c else c), (b if b < d else d)
            if start >= stop:
                return None
            spans.append((start, stop))
        return Box(tuple(spans))

    def minus(self, other: "Box") -> "tuple[Box, ...]":
        """What is left of this block without the other, as disjoint blocks."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        left, spans = [], list(self.spans)
        for dim, (start, stop) in enumerate(common.spans):
            low, high = spans[dim]
            if low < start:
                left.append(Box((*spans[:dim], (low, start), *spans[dim + 1 :])))
            if stop < high:
                left.append(Box((*spans[:dim], (stop, high), *spans[dim + 1 :])))
            spans[dim] = (start, stop)
        return tuple(left)

    def contains(self, other: "Box") -> bool:
        """Whether every element of the other block is in this one."""
        return all(a <= c and d <= b for (a, b), (c, d) in zip(self.spans, other.spans, strict=True))

    def shift(self, offsets: tuple[int, ...]) -> "Box":
        """The same block moved by an offset per dim."""
        return Box(tuple((a + by, b + by) for (a, b), by in zip(self.spans, offsets, strict=True)))


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One block of a logical tensor inside one local parameter.

    A fused parameter is several of these. `box` is in the logical tensor's indices; `param_start` says where the
    block's first element lies in the local parameter (same number of dims).
    """

    tensor: str
    box: Box
    param: str
    param_start: tuple[int, ...]

    def param_box(self, box: Box) -> Box:
        """Where a block of the logical tensor (inside self.box) lies in the local parameter."""
        return box.shift(tuple(at - start for at, (start, _) in zip(self.param_start, self.box.spans, strict=True)))


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What every rank of a pool holds.

    `holdings(rank)` lists one rank's blocks and may be called for any rank of `ranks` from anywhere: it is computed
    from the description of the layout, not from memory. Elements held by several ranks (or twice on one rank, as a
    tied embedding on one stage) are replicas. Ranks that hold the same should be given the same tuple object (cache it
    by their coordinates): such ranks are indexed once, which is what keeps plans over thousands of ranks cheap.
    """

    tensors: Mapping[str, tuple[int, ...]]
    """Global shape of each logical tensor by canonical (Hugging Face) name."""
    dtype: str
    """Of the stored elements: float32 or bfloat16. Both sides of a transfer must agree."""
    ranks: tuple[int, ...]
    holdings: Callable[[int], tuple[ParamLayout, ...]]

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored element."""
        return ITEM_BYTES[self.dtype]

    def only(self, names: Set[str]) -> "ModelLayout":
        """The same ranks with some of the tensors."""

        @cache
        def kept(held: tuple[ParamLayout, ...]) -> tuple[ParamLayout, ...]:
            return tuple(one for one in held if one.tensor in names)

        tensors = {name: shape for name, shape in self.tensors.items() if name in names}
        return ModelLayout(tensors, self.dtype, self.ranks, lambda rank: kept(self.holdings(rank)))
