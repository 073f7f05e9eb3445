"""Ranks as points of a grid of parallel axes: pure integers, no process group."""

from dataclasses import dataclass
from itertools import product
from math import prod

from rlhf.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Grid:
    """A block of consecutive ranks laid out along named axes; the first axis varies fastest.

    `Grid(("tp", "pp", "dp"), (2, 2, 1), first_rank=4)` holds ranks 4..7; rank 5 is tp 1, pp 0, dp 0.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    first_rank: int = 0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise LayoutError(
                f"grid: axes {self.axes} with sizes {self.sizes}; needs one size for each of distinct axes"
            )
        if min(self.sizes, default=1) < 1 or self.first_rank < 0:
            raise LayoutError(
                f"grid: sizes {self.sizes}, first_rank {self.first_rank}; needs sizes >= 1 and first_rank >= 0"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks in the grid."""
        return prod(self.sizes)

    @property
    def ranks(self) -> range:
        """The grid's ranks, ascending."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def size(self, axis: str) -> int:
        """Length of an axis; 1 for an axis the grid does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank of the grid, one per axis.

        Raises:
            LayoutError: The rank is outside the grid.
        """
        if rank not in self.ranks:
            raise LayoutError(f"grid: rank {rank} is not among {self.ranks}")
        index, found = rank - self.first_rank, {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            index, found[axis] = divmod(index, size)
        return found

    def rank(self, **coords: int) -> int:
        """Rank at the given coordinates; an axis left out is at 0."""
        unknown = set(coords) - set(self.axes)
        if unknown:
            raise LayoutError(f"grid: no axis {sorted(unknown)}; the axes are {self.axes}")
        index = 0
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            at = coords.get(axis, 0)
            if not 0 <= at < size:
                raise LayoutError(f"grid: {axis} = {at} is outside 0..{size - 1}")
            index = index * size + at
        return self.first_rank + index

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Sets of ranks that differ in the named axes only, each ascending, in order of their first rank."""
        inner = [a for a in self.axes if a in axes]
        outer = [a for a in self.axes if a not in axes]

        def points(names: list[str]) -> list[dict[str, int]]:
            return [dict(zip(names, at, strict=True)) for at in product(*(range(self.size(n)) for n in names))]

        return sorted(tuple(sorted(self.rank(**base, **at) for at in points(inner))) for base in points(outer))
