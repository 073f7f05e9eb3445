"""Which holder of a block serves which rank that wants it: one rule, to which both ends come by themselves.

A rank takes what it holds from itself, else from a rank of its node, else from any. Among equals the wanters of a block
are dealt out in turn, starting elsewhere for each tensor, so that the load of its holders differs by at most one such
block. With fanout `node` a block that no rank of a node holds crosses into the node once, to one of its ranks that want
it (these take turns too), and that rank passes it on to the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import Box
from rlhf.reshard.topology import Topology, by_node

_NOBODY: dict[int, int] = {}


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
        self._holders_on = by_node(src.layout.ranks, topology)
        self._wanters_on = by_node(dst.layout.ranks, topology)
        self._near: dict[tuple[str, Box, int], dict[int, int]] = {}
        self._far: dict[tuple[str, Box], dict[int, int]] = {}
        self._by_node: dict[tuple[int, ...], Mapping[int, tuple[int, ...]]] = {}
        self._crossings: dict[tuple[str, int], tuple[Crossing, ...]] = {}

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
        key = (tensor, node)
        if key not in self._crossings:
            self._crossings[key] = tuple(self._cross(tensor, node))
        return self._crossings[key]

    def _cross(self, tensor: str, node: int) -> Iterator[Crossing]:
        held = {
            one.box for holder in self._holders_on.get(node, ()) for one in self._src.of_rank(holder).get(tensor, ())
        }
        number = self._order[tensor]
        for part, wanters in self._atoms(tensor, node):
            left = [part]
            for box in held:
                left = [rest for one in left for rest in one.minus(box)]
            for box in self._src.boxes(tensor) if left else ():
                rest = []
                for one in left:
                    common = one.intersect(box)
                    if common is None:
                        rest.append(one)
                        continue
                    first = wanters[number % len(wanters)]
                    others = tuple(rank for rank in wanters if rank != first)
                    yield Crossing(common, self._sender(tensor, self._src.ranks(tensor, box), node), first, others)
                    number += 1
                    rest.extend(one.minus(common))
                left = rest

    def _atoms(self, tensor: str, node: int) -> list[tuple[Box, tuple[int, ...]]]:
        """What ranks of a node want of a tensor, cut so that each block is wanted whole by the same ranks."""
        wanters: dict[Box, list[int]] = {}
        for rank in self._wanters_on[node]:
            for box in {one.box: None for one in self._dst.of_rank(rank).get(tensor, ())}:
                wanters.setdefault(box, []).append(rank)
        atoms: list[tuple[Box, set[int]]] = []
        for box, ranks in wanters.items():
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

    def _sender(self, tensor: str, holders: Sequence[int], node: int) -> int:
        """Nodes take turns by their number, so that no rank needs to know which others want a block."""
        return holders[(self._order[tensor] + node) % len(holders)]

    def _near_of(self, tensor: str, box: Box, node: int) -> dict[int, int]:
        holders = self._on_nodes(self._src.ranks(tensor, box)).get(node)
        if not holders:
            return _NOBODY
        key = (tensor, box, node)
        if key not in self._near:
            wanting = (rank for rank in self._wanters_on.get(node, ()) if _wants(self._dst, rank, tensor, box))
            self._near[key] = self._deal(tensor, holders, wanting)
        return self._near[key]

    def _far_of(self, tensor: str, box: Box) -> dict[int, int]:
        key = (tensor, box)
        if key not in self._far:
            holders = self._src.ranks(tensor, box)
            near = self._on_nodes(holders)
            wanters = {
                rank
                for wanted in self._dst.boxes(tensor)
                if wanted.intersect(box) is not None
                for rank in self._dst.ranks(tensor, wanted)
                if self._topology.nodes[rank] not in near
            }
            self._far[key] = self._deal(tensor, holders, sorted(wanters))
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


def _wants(index: HolderIndex, rank: int, tensor: str, box: Box) -> bool:
    return any(one.box.intersect(box) is not None for one in index.of_rank(rank).get(tensor, ()))
