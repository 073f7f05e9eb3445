"""Who sends which block of which tensor to whom, from two layouts alone: pure integers, no communication.

Every rank plans only its own part, and both ends of a move come to the same by the same rule (`sources.py`): what a
rank wants is cut along the boxes that others hold, the nearest first.
"""

from collections.abc import Container, Generator, Iterator, Mapping
from dataclasses import dataclass

from rlhf.errors import LayoutError
from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.match import check_holdings, check_names_shapes_dtypes, check_whole
from rlhf.reshard.sources import Sources
from rlhf.reshard.topology import Fanout, Topology, by_node


@dataclass(frozen=True, slots=True)
class Move:
    """One block of a logical tensor from a source rank to a destination rank (which may be the same)."""

    tensor: str
    box: Box
    src_rank: int
    dst_rank: int
    origin: int = -1
    """When src_rank passes on what it received into its destination parameters: the rank that sent it to that one."""

    @property
    def passed_on(self) -> bool:
        """Whether it is read from the sender's destination parameters and not from its source."""
        return self.origin >= 0


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
    """To other ranks; those that are passed on can leave only after they were received."""
    echoes: tuple[Echo, ...]
    relayed: tuple[Move, ...] = ()
    """Moves by which other ranks pass on what this rank sent them."""

    @property
    def given(self) -> tuple[Move, ...]:
        """Everything that comes from this rank's source parameters, whoever brings it to its destination."""
        return (*self.copies, *(move for move in self.sends if not move.passed_on), *self.relayed)

    def only(self, tensors: Container[str]) -> "RankPlan":
        """The part that concerns some tensors."""
        return RankPlan(
            rank=self.rank,
            copies=tuple(move for move in self.copies if move.tensor in tensors),
            receives=tuple(move for move in self.receives if move.tensor in tensors),
            sends=tuple(move for move in self.sends if move.tensor in tensors),
            echoes=tuple(echo for echo in self.echoes if echo.tensor in tensors),
            relayed=tuple(move for move in self.relayed if move.tensor in tensors),
        )


class Plan:
    """The moves between two layouts of one model; made by `make_plan`, worked out rank by rank when asked."""

    def __init__(self, src: ModelLayout, dst: ModelLayout, topology: Topology, fanout: Fanout) -> None:
        self.src, self.dst, self.topology, self.fanout = src, dst, topology, fanout
        self.src_index, self.dst_index = HolderIndex(src), HolderIndex(dst)
        self.order: Mapping[str, int] = {name: at for at, name in enumerate(src.tensors)}
        """Place of each tensor in the order that all ranks share."""
        self.ranks: tuple[int, ...] = tuple(sorted({*src.ranks, *dst.ranks}))
        """Ranks of either pool, ascending."""
        if self.ranks[-1] >= len(topology.nodes):
            raise LayoutError(
                f"reshard: rank {self.ranks[-1]} has no node; the topology knows {len(topology.nodes)} ranks; needs all"
            )
        self.on_node: Mapping[int, tuple[int, ...]] = by_node(self.ranks, topology)
        """Ranks of either pool on each node, ascending."""
        self._sources = Sources(self.src_index, self.dst_index, topology, self.order)
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
            relayed=self._sorted(self._relayed(rank)) if self.fanout is Fanout.NODE else (),
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
            left = yield from self._cover(fresh, dst_rank, tensor)
            if left and self.fanout is Fanout.NODE:
                yield from self._crossing(want.box, [one.box for one in wants[:at]], dst_rank, tensor)
            elif left:
                raise LayoutError(
                    f"reshard: no source rank holds {tensor} at {left[0].spans}; correct the source layout"
                )

    def _cover(self, wanted: list[Box], dst_rank: int, tensor: str) -> Generator[Move, None, list[Box]]:
        """Cut wanted blocks along the source boxes, nearest holders first; returns what is left.

        With fanout `node`, along the boxes held on the rank's node only.
        """
        cuts = self._cuts_of(tensor, wanted[0]) if len(wanted) == 1 else None
        if cuts is not None:
            return (yield from self._cover_by(cuts, dst_rank, tensor))
        sources = []
        for box in self.src_index.boxes(tensor):
            if any(part.intersect(box) is not None for part in wanted):
                near = self._sources.near(tensor, box, dst_rank)
                if near is not None:
                    sources.append((int(near != dst_rank), near, box))
                elif self.fanout is Fanout.DIRECT:
                    sources.append((2, self._sources.far(tensor, box, dst_rank), box))
        for _, source, box in sorted(sources, key=lambda found: found[0]):
            rest = []
            for part in wanted:
                common = part.intersect(box)
                if common is None:
                    rest.append(part)
                    continue
                yield Move(tensor, common, source, dst_rank)
                rest.extend(part.minus(common))
            wanted = rest
        return wanted

    def _cover_by(
        self, cuts: tuple[tuple[Box, Box], ...], dst_rank: int, tensor: str
    ) -> Generator[Move, None, list[Box]]:
        """`_cover` where the cuts are known: each part from a holder of its source box."""
        left = []
        for box, src_box in cuts:
            source = self._sources.near(tensor, src_box, dst_rank)
            if source is None and self.fanout is Fanout.NODE:
                left.append(box)
            else:
                source = self._sources.far(tensor, src_box, dst_rank) if source is None else source
                yield Move(tensor, box, source, dst_rank)
        return left

    def _crossing(self, wanted: Box, earlier: list[Box], dst_rank: int, tensor: str) -> Iterator[Move]:
        """What a rank takes across, or from the rank of its node that did, of a want that earlier ones do not cover."""
        for one in self._sources.crossings(tensor, self.topology.nodes[dst_rank]):
            if one.first != dst_rank and dst_rank not in one.others:
                continue
            if not wanted.contains(one.box) or any(box.contains(one.box) for box in earlier):
                continue
            if one.first == dst_rank:
                yield Move(tensor, one.box, one.source, dst_rank)
            else:
                yield Move(tensor, one.box, one.first, dst_rank, origin=one.source)

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
            takers = {taker for box in {one.box for one in held} for taker in self._takers(tensor, box, rank)}
            for taker in sorted(takers):
                for found in self.into(taker, tensor):
                    if isinstance(found, Move) and found.src_rank == rank and not found.passed_on:
                        yield found
        for tensor in self.dst_index.of_rank(rank) if self.fanout is Fanout.NODE else ():
            for one in self._sources.crossings(tensor, self.topology.nodes[rank]):
                if one.first == rank:
                    yield from (Move(tensor, one.box, rank, other, origin=one.source) for other in one.others)

    def _relayed(self, rank: int) -> Iterator[Move]:
        for tensor, held in self.src_index.of_rank(rank).items():
            for node in {node for one in held for node in self._sources.nodes_served(tensor, one.box, rank)}:
                for one in self._sources.crossings(tensor, node):
                    if one.source == rank:
                        yield from (Move(tensor, one.box, one.first, other, origin=rank) for other in one.others)

    def _takers(self, tensor: str, box: Box, rank: int) -> Iterator[int]:
        """Other ranks that may take a part of its source box from a rank."""
        yield from self._sources.near_takers(tensor, box, rank)
        if self.fanout is Fanout.DIRECT:
            yield from self._sources.far_takers(tensor, box, rank)
            return
        for node in self._sources.nodes_served(tensor, box, rank):
            yield from (one.first for one in self._sources.crossings(tensor, node) if one.source == rank)

    def _sorted(self, moves: Iterator[Move]) -> tuple[Move, ...]:
        return tuple(sorted(moves, key=lambda m: (self.order[m.tensor], m.box.spans, m.src_rank, m.dst_rank)))


def make_plan(src: ModelLayout, dst: ModelLayout, topology: Topology, *, fanout: Fanout = Fanout.DIRECT) -> Plan:
    """The plan that fills `dst` from `src`. Pure: the same on every rank, no communication.

    Raises:
        LayoutError: The two are not whole layouts of one model in one dtype, or a rank has no node; the tensor or
            parameter is named.
    """
    check_names_shapes_dtypes(src, dst)
    check_holdings(src, "source")
    check_holdings(dst, "destination")
    plan = Plan(src, dst, topology, fanout)
    check_whole(plan.src_index, "source")
    check_whole(plan.dst_index, "destination")
    return plan
