"""What ranks hold of a model: which box of which logical tensor lies where in which local parameter.

A layout is pure data: no tensor, no process group. Both sides of a transfer describe themselves this way, so the
planner needs no name mapping and no knowledge of any model or library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

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
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index for a tensor of the space that the box lies in."""
        return tuple(slice(start, stop) for start, stop in self.spans)

    def intersect(self, other: "Box") -> "Box | None":
        """The common block, or None when they share no element."""
        spans = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.spans, other.spans, strict=True))
        return Box(spans) if all(start < stop for start, stop in spans) else None

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
    tied embedding on one stage) are replicas.
    """

    tensors: Mapping[str, tuple[int, ...]]
    """Global shape of each logical tensor by canonical (Hugging Face) name."""
    dtype: str
    """Of the stored elements: float32 or bfloat16. Both sides of a transfer must agree."""
    ranks: tuple[int, ...]
    holdings: Callable[[int], tuple[ParamLayout, ...]]
