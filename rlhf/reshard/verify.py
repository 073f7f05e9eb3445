"""Proof after a transfer: what each destination holds against what its sources gave, by sums that fit any cut.

Both sides sum the same elements of the logical tensors: everything, or a slice of every tensor (`Turn`). Where the sums
differ, the ranks look together for the tensors, and in each for the smallest block that differs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod
from typing import Protocol

from rlhf.reshard.checksum import Place, checksums, wrapped
from rlhf.reshard.execute import LocalParams
from rlhf.reshard.layout import Box, Span
from rlhf.reshard.plan import Plan, RankPlan
from rlhf.reshard.turn import Turn

ReduceFn = Callable[[list[int]], list[int]]
"""Sums over the ranks of both pools, place by place, modulo 2^64; signed. Collective over them."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What one rank found on its two sides of a transfer, in one turn."""

    given: Mapping[int, Mapping[str, int]]
    """By destination rank and tensor."""
    held: Mapping[str, int]
    """By tensor."""
    differences: list[int]
    """For each rank of the destination's pool, given minus held: added up over all ranks, 0 where both are equal."""


class HeldFn(Protocol):
    """Whoever has a rank's destination parameters."""

    def __call__(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """Checksum of what the rank holds inside each place, in the short form or not."""


CUTS = 256
"""Blocks into which one that differs is cut, at most: three rounds find one element of a million, four of a billion."""

NARROWED = 4
"""Tensors of a rank in which the smallest block is looked for; of others, all that the rank holds is named."""


class Verify(StrEnum):
    """What is compared after a transfer."""

    ALL = "all"
    """Every element."""
    SAMPLE = "sample"
    """A slice of every tensor, another each time; every element after the first transfer and after a failure."""
    NONE = "none"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block of a destination rank's parameters that does not hold what the sources gave."""

    rank: int
    tensor: str
    box: Box
    """In the logical tensor; what is wrong of it on this rank lies inside."""
    given: int
    """Checksum of the block by the source parameters."""
    held: int
    """By the rank's parameters."""

    def __str__(self) -> str:
        place = ", ".join(f"{start}:{stop}" for start, stop in self.box.spans)
        sums = f"given {self.given % 2**64:016x}, held {self.held % 2**64:016x}"
        return f"rank {self.rank} holds {self.tensor}[{place}] otherwise ({sums})"


NO_SUMS = Sums({}, {}, [])
"""Of a transfer after which nothing is compared."""


class Comparison:
    """One rank's part in comparing both sides of a transfer, as often as asked."""

    def __init__(self, plan: Plan, part: RankPlan, reduce: ReduceFn) -> None:
        self._plan, self._part, self._reduce = plan, part, reduce
        to: dict[Place, list[int]] = {}
        for move in part.given:
            to.setdefault((move.tensor, move.box), []).append(move.dst_rank)
        self._to: Mapping[Place, list[int]] = to
        """Each block that this rank gives, with the ranks that get it."""
        self._parts: dict[Turn, tuple[list[tuple[Place, list[int]]], list[Place]]] = {}

    def sums(self, src: LocalParams, held: HeldFn, turn: Turn) -> Sums:
        """Read what the turn checks on this rank. Local."""
        (giving, holding), brief = self._parts_of(turn), turn.slices > 1
        given: dict[int, dict[str, int]] = {}
        for (place, ranks), number in zip(giving, _sums(src, [place for place, _ in giving], brief=brief), strict=True):
            for rank in ranks:
                _add(given.setdefault(rank, {}), place[0], number)
        mine: dict[str, int] = {}
        for (tensor, _), number in zip(holding, held(holding, brief=brief), strict=True):
            _add(mine, tensor, number)
        own = sum(mine.values())
        totals = (sum(given.get(rank, {}).values()) - self._own(rank, own) for rank in self._plan.dst.ranks)
        return Sums(given, mine, [wrapped(total) for total in totals])

    def search(self, sums: Sums, totals: Sequence[int], src: LocalParams, held: HeldFn) -> tuple[Mismatch, ...]:
        """What differs, from the sums of `Sums.differences` over all ranks: the same on every rank.

        Collective over the ranks of both pools where one is not 0; else nothing is asked and nothing found.
        """
        wrong = [self._plan.dst.ranks[at] for at, total in enumerate(totals) if wrapped(total)]
        return tuple(one for rank in wrong for one in self._search(rank, sums, src, held))

    def _search(self, rank: int, sums: Sums, src: LocalParams, held: HeldFn) -> Iterator[Mismatch]:
        """What differs on one rank. Collective."""
        names, given = list(self._plan.dst_index.of_rank(rank)), sums.given.get(rank, {})
        totals = self._reduce([given.get(name, 0) - self._own(rank, sums.held.get(name, 0)) for name in names])
        for number, name in enumerate(name for name, total in zip(names, totals, strict=True) if total):
            yield self._narrowed(rank, name, src, held, rounds=64 if number < NARROWED else 1)

    def _narrowed(self, rank: int, tensor: str, src: LocalParams, held: HeldFn, *, rounds: int) -> Mismatch:
        """The smallest block around what differs: cut into blocks again and again. Collective."""
        box = self._all_of(rank, tensor)
        while True:
            blocks = list(grid(box, CUTS)) if rounds > 1 else [box]
            given, mine = self._sums_in(rank, tensor, blocks, src, held)
            differ = [at for at in range(len(blocks)) if given[at] != mine[at]]
            smaller = around(blocks[at] for at in differ) if differ else box
            rounds -= 1
            if smaller == box or not rounds:
                return Mismatch(rank, tensor, box, wrapped(sum(given)), wrapped(sum(mine)))
            box = smaller

    def _sums_in(
        self, rank: int, tensor: str, boxes: Sequence[Box], src: LocalParams, held: HeldFn
    ) -> tuple[list[int], list[int]]:
        """(given to, held by) a rank of a tensor inside each box. Collective."""
        cut = [
            (at, (tensor, common))
            for (name, there), ranks in self._to.items()
            if name == tensor and rank in ranks
            for at, box in enumerate(boxes)
            if (common := box.intersect(there)) is not None
        ]
        given = [0] * len(boxes)
        for (at, _), number in zip(cut, _sums(src, [place for _, place in cut], brief=False), strict=True):
            given[at] += number
        mine = (
            list(held([(tensor, box) for box in boxes], brief=False)) if rank == self._part.rank else [0] * len(boxes)
        )
        both = self._reduce([*given, *mine])
        return both[: len(boxes)], both[len(boxes) :]

    def _parts_of(self, turn: Turn) -> tuple[list[tuple[Place, list[int]]], list[Place]]:
        """(what this rank gives, with the takers; what it holds) of a turn; kept, since turns come round."""
        if turn not in self._parts:
            shapes, me = self._plan.dst.tensors, self._part.rank
            giving = [
                ((tensor, part), ranks)
                for (tensor, box), ranks in self._to.items()
                for part in turn.parts(tensor, shapes[tensor], box)
            ]
            holding = [
                (tensor, part)
                for tensor in self._plan.dst_index.of_rank(me)
                for part in turn.parts(tensor, shapes[tensor], self._all_of(me, tensor))
            ]
            self._parts[turn] = giving, holding
        return self._parts[turn]

    def _all_of(self, rank: int, tensor: str) -> Box:
        """The least box around what a rank holds of a tensor."""
        return around(one.box for one in self._plan.dst_index.of_rank(rank)[tensor])

    def _own(self, rank: int, number: int) -> int:
        return number if rank == self._part.rank else 0


def around(boxes: Iterable[Box]) -> Box:
    """The least box that contains all of them; there is at least one."""
    spans = zip(*(box.spans for box in boxes), strict=True)
    return Box(tuple((min(start for start, _ in along), max(stop for _, stop in along)) for along in spans))


def grid(box: Box, most: int) -> Iterator[Box]:
    """Cut a block into at most so many blocks of about the same size, its longest sides first."""
    cuts = [1] * len(box.shape)
    while True:
        sides = [extent / count for extent, count in zip(box.shape, cuts, strict=True)]
        longest = sides.index(max(sides))
        if sides[longest] <= 1 or prod(cuts) * 2 > most:
            break
        cuts[longest] *= 2
    blocks: list[tuple[Span, ...]] = [()]
    for (start, stop), count in zip(box.spans, cuts, strict=True):
        edges = sorted({start + (stop - start) * at // count for at in range(count + 1)})
        blocks = [(*block, span) for block in blocks for span in pairwise(edges)]
    yield from (Box(block) for block in blocks)


def _sums(src: LocalParams, places: Sequence[Place], *, brief: bool) -> list[int]:
    return checksums([(*place, src.view(*place)) for place in places], brief=brief)


def _add(sums: dict[str, int], tensor: str, number: int) -> None:
    sums[tensor] = sums.get(tensor, 0) + number
