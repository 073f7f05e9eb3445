"""Which ranks share a machine, and what kind of link lies between two ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Link(Enum):
    """How far a piece travels."""

    SAME_RANK = "same rank"
    SAME_NODE = "same node"
    ACROSS_NODES = "across nodes"


@dataclass(frozen=True, slots=True)
class Topology:
    """The node of every rank of the job."""

    nodes: tuple[int, ...]

    @staticmethod
    def blocks(world_size: int, *, ranks_per_node: int) -> "Topology":
        """Nodes of equal size filled one after the other, as torchrun does."""
        return Topology(tuple(rank // ranks_per_node for rank in range(world_size)))

    @staticmethod
    def of_hosts(hosts: Sequence[str]) -> "Topology":
        """From the host name of every rank, in order of rank."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return Topology(tuple(numbers[host] for host in hosts))

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        if a == b:
            return Link.SAME_RANK
        return Link.SAME_NODE if self.nodes[a] == self.nodes[b] else Link.ACROSS_NODES
