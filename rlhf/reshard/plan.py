"""Who sends which block of which tensor to whom, from two layouts alone: pure integers, no communication.

Every rank plans only its own part, and both ends of a move come to the same by the same rule. A destination rank takes
a wanted block from itself if it holds it, else from a rank of its node, else from any; among equals the wanters of a
block are dealt out in turn, so that the load of its holders differs by at most one such block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhf.errors import LayoutError
from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.match import check_holdings, check_names_shapes_dtypes, check_whole
from rlhf.reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Move:
    """One block of a logical tensor from a source rank to a destination rank (which may be the same)."""

    tensor: str
    box: Box
    src_rank: int
    dst_rank: int


@dataclass(frozen=True, slots=True)
class Echo:
    """A block that a destination rank wants a second time: copied from its first place after that is filled."""

    tensor: str
    box: Box
    first: ParamLayout
    second: ParamLayout


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part, each list in the order of the model's tensors, then of the boxes."""

    rank: int
    copies: tuple[Move, ...]
    """From this rank to itself."""
    receives: tuple[Move, ...]
    sends: tuple[Move, ...]
    echoes: tuple[Echo, ...]


class Plan:
    """The moves between two layouts of one model; made by `make_plan`, worked out rank by rank when asked."""

    def __init__(self, src: ModelLayout, dst: ModelLayout, topology: Topology) -> None:
        self.src, self.dst, self.topology = src, dst, topology
        self.src_index, self.dst_index = HolderIndex(src), HolderIndex(dst)
        self.order: Mapping[str, int] = {name: at for at, name in enumerate(src.tensors)}
        """Place of each tensor in the order that all ranks share."""
        self.ranks: tuple[int, ...] = tuple(sorted({*src.ranks, *dst.ranks}))
        """Ranks of either pool, ascending."""
        self._sources: dict[tuple[str, Box], dict[int, int]] = {}
        self._cuts: dict[tuple[str, Box], tuple[tuple[Box, Box], ...] | None] = {}

    def of(self, rank: int) -> RankPlan:
        """The part of one rank; a rank of neither pool has an empty one.

        Time: own pieces on both sides, each times the boxes of its tensor and the ranks that want its block.
        """
        into = [found for tensor in self.dst_index.of_rank(rank) for found in self.into(rank, tensor)]
        moves = [found for found in into if isinstance(found, Move)]
        return RankPlan(
            rank=rank,
            copies=self._sorted(move for move in moves if move.src_rank == rank),
            receives=self._sorted(move for move in moves if move.src_rank != rank),
            sends=self._sorted(self._sends(rank)),
            echoes=tuple(found for found in into if isinstance(found, Echo)),
        )

    def into(self, dst_rank: int, tensor: str) -> Iterator[Move | Echo]:
        """Everything that fills one rank's wants of one tensor: each wanted element in one move or echo.

        Raises:
            LayoutError: No source rank holds a wanted block.
        """
        wants = self.dst_index.of_rank(dst_rank).get(tensor, ())
        for at, want in enumerate(wants):
            fresh = [want.box]
            for earlier in wants[:at]:
                common = [(part, part.intersect(earlier.box)) for part in fresh]
                yield from (Echo(tensor, box, earlier, want) for _, box in common if box is not None)
                fresh = [left for part in fresh for left in part.minus(earlier.box)]
            yield from self._cover(fresh, dst_rank, tensor)

    def _cover(self, wanted: list[Box], dst_rank: int, tensor: str) -> Iterator[Move]:
        """Cut wanted blocks along the source boxes, nearest holders first."""
        cuts = self._cuts_of(tensor, wanted[0]) if len(wanted) == 1 else None
        if cuts is not None:
            for box, src_box in cuts:
                yield Move(tensor, box, self._source(tensor, src_box, dst_rank), dst_rank)
            return
        near = [box for box in self.src_index.boxes(tensor) if any(part.intersect(box) is not None for part in wanted)]
        if len(near) > 1:
            near.sort(key=lambda box: self._distance(self._source(tensor, box, dst_rank), dst_rank))
        for box in near:
            rest = []
            for part in wanted:
                common = part.intersect(box)
                if common is None:
                    rest.append(part)
                    continue
                yield Move(tensor, common, self._source(tensor, box, dst_rank), dst_rank)
                rest.extend(part.minus(common))
            wanted = rest
        if wanted:
            raise LayoutError(f"reshard: no source rank holds {tensor} at {wanted[0].spans}; correct the source layout")

    def _cuts_of(self, tensor: str, wanted: Box) -> tuple[tuple[Box, Box], ...] | None:
        """(part of a wanted block, source box with it) where source boxes do not overlap: the same for every rank.

        None where they overlap and the rank's own place decides, or where they leave a part out.
        """
        key = (tensor, wanted)
        if key not in self._cuts:
            found = [(wanted.intersect(box), box) for box in self.src_index.boxes(tensor)]
            parts = [(part, box) for part, box in found if part is not None]
            overlap = any(a.intersect(b) is not None for at, (a, _) in enumerate(parts) for b, _ in parts[:at])
            whole = sum(part.num_elements for part, _ in parts) == wanted.num_elements
            self._cuts[key] = tuple(parts) if whole and not overlap else None
        return self._cuts[key]

    def _sends(self, rank: int) -> Iterator[Move]:
        for tensor, held in self.src_index.of_rank(rank).items():
            takers = {
                taker
                for box in {one.box for one in held}
                for taker, source in self._sources_of(tensor, box).items()
                if source == rank and taker != rank
            }
            for taker in sorted(takers):
                for found in self.into(taker, tensor):
                    if isinstance(found, Move) and found.src_rank == rank:
                        yield found

    def _source(self, tensor: str, box: Box, dst_rank: int) -> int:
        return self._sources_of(tensor, box)[dst_rank]

    def _sources_of(self, tensor: str, box: Box) -> dict[int, int]:
        """For every rank that wants a part of a source box: the holder it takes it from."""
        key = (tensor, box)
        if key not in self._sources:
            self._sources[key] = self._deal(tensor, box)
        return self._sources[key]

    def _deal(self, tensor: str, box: Box) -> dict[int, int]:
        holders = self.src_index.ranks(tensor, box)
        on_node: dict[int, list[int]] = {}
        for holder in holders:
            on_node.setdefault(self.topology.nodes[holder], []).append(holder)
        wanters = {
            rank
            for wanted in self.dst_index.boxes(tensor)
            if wanted.intersect(box) is not None
            for rank in self.dst_index.ranks(tensor, wanted)
        }
        # Turns start elsewhere for each tensor, so that what does not divide evenly does not pile up on the first.
        turns: dict[int, int] = {}
        held, dealt = set(holders), {}
        for wanter in sorted(wanters):
            if wanter in held:
                dealt[wanter] = wanter
                continue
            node = self.topology.nodes[wanter]
            group = on_node.get(node, holders)
            turn_of = node if node in on_node else -1
            turn = turns.get(turn_of, self.order[tensor])
            dealt[wanter] = group[turn % len(group)]
            turns[turn_of] = turn + 1
        return dealt

    def _distance(self, src_rank: int, dst_rank: int) -> int:
        if src_rank == dst_rank:
            return 0
        return 1 if self.topology.nodes[src_rank] == self.topology.nodes[dst_rank] else 2

    def _sorted(self, moves: Iterator[Move]) -> tuple[Move, ...]:
        return tuple(sorted(moves, key=lambda m: (self.order[m.tensor], m.box.spans, m.src_rank, m.dst_rank)))


def make_plan(src: ModelLayout, dst: ModelLayout, topology: Topology) -> Plan:
    """The plan that fills `dst` from `src`. Pure: the same on every rank, no communication.

    Raises:
        LayoutError: The two are not whole layouts of one model in one dtype, or a rank has no node; the tensor or
            parameter is named.
    """
    check_names_shapes_dtypes(src, dst)
    check_holdings(src, "source")
    check_holdings(dst, "destination")
    plan = Plan(src, dst, topology)
    if plan.ranks[-1] >= len(topology.nodes):
        raise LayoutError(
            f"reshard: rank {plan.ranks[-1]} has no node; the topology knows {len(topology.nodes)} ranks; needs all"
        )
    check_whole(plan.src_index, "source")
    check_whole(plan.dst_index, "destination")
    return plan
