"""Which holder of a block serves which rank that wants it: one rule, to which both ends come by themselves.

A rank takes what it holds from itself, else from a rank of its node, else from any. Among equals the wanters of a block
are dealt out in turn, starting elsewhere for each tensor, so that the load of its holders differs by at most one such
block. With fanout `node` a block that no rank of a node holds crosses into the node once, to one of its ranks that want
it (these take turns too), and that rank passes it on to the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from rlhf.reshard.index import HolderIndex, Holders
from rlhf.reshard.layout import Box
from rlhf.reshard.topology import Topology, by_node

_NOBODY: dict[int, int] = {}

_Deal = tuple[int, Box, tuple[int, ...], int]
"""Id of a tensor's wanters, source box, those of its holders that serve, whose turn it is."""

_Block = tuple[Box, tuple[int, ...], tuple[int, ...]]
"""A block, the ranks that hold it, and those that want it."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A block that crosses into a node once."""

    box: Box
    source: int
    """Rank of another node that holds it."""
    first: int
    """Rank of the node that it is sent to."""
    others: tuple[int, ...]
    """Ranks of the node that `first` passes it on to, ascending."""


class Sources:
    """Holders dealt to wanters. Caches what it was asked; the same on every rank."""

    def __init__(self, src: HolderIndex, dst: HolderIndex, topology: Topology, order: Mapping[str, int]) -> None:
        self._src, self._dst, self._topology, self._order = src, dst, topology, order
        self._wanters_on = by_node(dst.layout.ranks, topology)
        # By what a tensor's wants and holders are, not by its name: layers and experts are alike.
        self._near: dict[_Deal, dict[int, int]] = {}
        self._far: dict[_Deal, dict[int, int]] = {}
        self._by_node: dict[tuple[int, ...], Mapping[int, tuple[int, ...]]] = {}
        self._blocks: dict[tuple[int, int, int], tuple[tuple[_Block, ...], int]] = {}
        self._crossings: dict[tuple[int, int, int], tuple[Crossing, ...]] = {}

    def near(self, tensor: str, box: Box, dst_rank: int) -> int | None:
        """The holder of a source box, itself or on its node, that a rank takes its part from; None if there is none."""
        return self._near_of(tensor, box, self._topology.nodes[dst_rank]).get(dst_rank)

    def far(self, tensor: str, box: Box, dst_rank: int) -> int:
        """The holder of a source box that a rank takes its part from when none is on its node."""
        return self._far_of(tensor, box)[dst_rank]

    def near_takers(self, tensor: str, box: Box, rank: int) -> set[int]:
        """Other ranks of its node that may take a part of its source box from a rank."""
        served = self._near_of(tensor, box, self._topology.nodes[rank])
        return {taker for taker, source in served.items() if source == rank and taker != rank}

    def far_takers(self, tensor: str, box: Box, rank: int) -> set[int]:
        """Ranks of other nodes that may take a part of its source box from a rank, each for itself."""
        return {taker for taker, source in self._far_of(tensor, box).items() if source == rank}

    def nodes_served(self, tensor: str, box: Box, rank: int) -> Iterator[int]:
        """Nodes that take a block of its source box across from a rank, when a block crosses once."""
        holders = self._src.ranks(tensor, box)
        for node in self._wanters_on:
            if node != self._topology.nodes[rank] and self._sender(tensor, holders, node) == rank:
                yield node

    def crossings(self, tensor: str, node: int) -> tuple[Crossing, ...]:
        """What crosses into a node of a tensor when each block does so once: disjoint, each wanted by all its ranks."""
        blocks, period = self._cut(tensor, node)
        # What is the same for all layers and experts is made once for each turn of theirs.
        key = (id(blocks), node, self._order[tensor] % period)
        if key not in self._crossings:
            self._crossings[key] = tuple(self._cross(blocks, tensor, node))
        return self._crossings[key]

    def _cross(self, blocks: Iterable[_Block], tensor: str, node: int) -> Iterator[Crossing]:
        for number, (box, holders, wanters) in enumerate(blocks, self._order[tensor]):
            first = wanters[number % len(wanters)]
            others = tuple(rank for rank in wanters if rank != first)
            yield Crossing(box, self._sender(tensor, holders, node), first, others)

    def _cut(self, tensor: str, node: int) -> tuple[tuple[_Block, ...], int]:
        """What ranks of a node want of a tensor and none of them holds; after how many tensors turns come round."""
        wanters, holders = self._dst.holders(tensor), self._src.holders(tensor)
        key = (id(wanters), id(holders), node)
        if key not in self._blocks:
            held = [box for box, _ in self._on_node(holders, node)]
            found = []
            for part, ranks in _atoms(self._on_node(wanters, node)):
                left = [part]
                for box in held:
                    left = [rest for one in left for rest in one.minus(box)]
                for box, sources in holders if left else ():
                    common = [(one, one.intersect(box)) for one in left]
                    found += [(block, sources, ranks) for _, block in common if block is not None]
                    left = [rest for one, block in common for rest in (one.minus(block) if block else (one,))]
            turns = (len(ranks) for _, sources, wanting in found for ranks in (sources, wanting))
            self._blocks[key] = tuple(found), lcm(*turns)
        return self._blocks[key]

    def _on_node(self, holders: Holders, node: int) -> Holders:
        """What is held, or wanted, on one node."""
        found = ((box, self._on_nodes(ranks).get(node)) for box, ranks in holders)
        return tuple((box, ranks) for box, ranks in found if ranks)

    def _sender(self, tensor: str, holders: Sequence[int], node: int) -> int:
        """Nodes take turns by their number, so that no rank needs to know which others want a block."""
        return holders[(self._order[tensor] + node) % len(holders)]

    def _near_of(self, tensor: str, box: Box, node: int) -> dict[int, int]:
        holders = self._on_nodes(self._src.ranks(tensor, box)).get(node)
        if not holders:
            return _NOBODY
        wanters = self._dst.holders(tensor)
        key = (id(wanters), box, holders, self._order[tensor] % len(holders))
        if key not in self._near:
            wanting = {rank for there, ranks in self._on_node(wanters, node) if there.intersect(box) for rank in ranks}
            self._near[key] = self._deal(tensor, holders, sorted(wanting))
        return self._near[key]

    def _far_of(self, tensor: str, box: Box) -> dict[int, int]:
        holders, wanters = self._src.ranks(tensor, box), self._dst.holders(tensor)
        key = (id(wanters), box, holders, self._order[tensor] % len(holders))
        if key not in self._far:
            near = self._on_nodes(holders)
            wanting = {
                rank
                for wanted, ranks in wanters
                if wanted.intersect(box) is not None
                for rank in ranks
                if self._topology.nodes[rank] not in near
            }
            self._far[key] = self._deal(tensor, holders, sorted(wanting))
        return self._far[key]

    def _on_nodes(self, holders: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        """Holders of a source box by node; the same tuple is looked at once."""
        if holders not in self._by_node:
            self._by_node[holders] = by_node(holders, self._topology)
        return self._by_node[holders]

    def _deal(self, tensor: str, holders: Sequence[int], wanters: Iterable[int]) -> dict[int, int]:
        # Turns start elsewhere for each tensor, so that what does not divide evenly does not pile up on the first.
        held, dealt, turn = set(holders), {}, self._order[tensor]
        for wanter in wanters:
            if wanter in held:
                dealt[wanter] = wanter
            else:
                dealt[wanter] = holders[turn % len(holders)]
                turn += 1
        return dealt


def _atoms(wanted: Holders) -> list[tuple[Box, tuple[int, ...]]]:
    """What ranks of a node want, cut so that each block is wanted whole by the same ranks."""
    atoms: list[tuple[Box, set[int]]] = []
    for box, ranks in wanted:
        fresh, cut = [box], []
        for atom, others in atoms:
            common = atom.intersect(box)
            if common is None:
                cut.append((atom, others))
                continue
            cut.append((common, others | set(ranks)))
            cut.extend((rest, others) for rest in atom.minus(common))
            fresh = [rest for one in fresh for rest in one.minus(common)]
        atoms = [*cut, *((one, set(ranks)) for one in fresh)]
    return [(box, tuple(sorted(ranks))) for box, ranks in atoms]
