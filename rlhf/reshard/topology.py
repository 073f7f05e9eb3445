"""Which ranks share a machine, and what kind of link lies between two ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum


class Link(Enum):
    """How far a piece travels."""

    SAME_RANK = "same rank"
    SAME_NODE = "same node"
    ACROSS_NODES = "across nodes"


class Fanout(StrEnum):
    """How a block reaches several ranks of a node that does not hold it."""

    DIRECT = "direct"
    """Each takes it across by itself."""
    NODE = "node"
    """One takes it across and passes it on."""


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


def by_node(ranks: Iterable[int], topology: Topology) -> Mapping[int, tuple[int, ...]]:
    """The given ranks of each node, ascending."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(topology.nodes[rank], []).append(rank)
    return {node: tuple(there) for node, there in found.items()}
