"""Seconds that bytes take on links: what a transfer could reach if nothing but its slowest link counted.

No latency, no packing, no other traffic; in and out of a rank at the same time, and the links inside a node beside
those that leave it. A transfer takes longer; these compare ways of moving the same weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf.reshard.check import Certificate
from rlhf.reshard.topology import Link, Topology

GIGABIT_BYTES = 125_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidths:
    """Of one rank, each direction, in gigabits a second."""

    intra_node_gbps: float = 3600.0
    """Default: fourth-generation NVLink of an H100, 450 GB/s each way, by its data sheet."""
    inter_node_gbps: float = 400.0
    """Default: one port of 400 Gb/s for each GPU."""

    def seconds(self, link: Link, num_bytes: float) -> float:
        """Of bytes over one rank's link; copies inside a rank are not counted."""
        if link is Link.SAME_RANK:
            return 0.0
        gbps = self.intra_node_gbps if link is Link.SAME_NODE else self.inter_node_gbps
        return num_bytes / (gbps * GIGABIT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The rank, link and direction that take longest."""

    seconds: float
    rank: int
    link: Link
    direction: str
    """in or out."""


def slowest(certificate: Certificate, bandwidths: Bandwidths) -> Slowest:
    """Of a planned transfer; the first of equals."""
    busiest = Slowest(seconds=0.0, rank=certificate.ranks[0].rank, link=Link.SAME_RANK, direction="in")
    for one in certificate.ranks:
        for direction, counted in (("in", one.received), ("out", one.sent)):
            for link, count in counted.items():
                if (seconds := bandwidths.seconds(link, count)) > busiest.seconds:
                    busiest = Slowest(seconds=seconds, rank=one.rank, link=link, direction=direction)
    return busiest


def gather_seconds(
    groups: Iterable[Sequence[int]], shard_bytes: float, topology: Topology, bandwidths: Bandwidths
) -> float:
    """Least seconds in which every rank of a group can get the shards of all others.

    Each shard enters a node once and spreads inside; the group's ranks on the node share what enters. No real gather is
    faster, so peers that are given these seconds are not wronged.
    """
    longest = 0.0
    for group in groups:
        on_node: dict[int, int] = {}
        for rank in group:
            on_node[topology.nodes[rank]] = on_node.get(topology.nodes[rank], 0) + 1
        for members in set(on_node.values()):
            across = (len(group) - members) * shard_bytes / members
            inside = (len(group) - 1) * shard_bytes - across
            by_link: Mapping[Link, float] = {Link.SAME_NODE: inside, Link.ACROSS_NODES: across}
            longest = max(longest, *(bandwidths.seconds(link, count) for link, count in by_link.items()))
    return longest
