"""On which hosts an engine's ranks lie, and which GPUs SGLang takes there: names and integers, nothing is started."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.errors import LayoutError

WHERE = "sglang engine"


@dataclass(frozen=True, slots=True)
class Node:
    """One host's part of an engine. SGLang starts a process a rank there, and is told only these."""

    host: str
    first_gpu: int
    """Index of its first rank's GPU; 0 on CPUs."""
    gpu_step: int
    """From the GPU of one rank to that of the next; 1 on CPUs."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """An engine's hosts in the order of its tp ranks, as many ranks on each."""

    parts: tuple[Node, ...]
    ranks_per_node: int

    def of(self, tp_rank: int) -> int:
        """Number of the node that a rank lies on."""
        return tp_rank // self.ranks_per_node

    def leads(self, tp_rank: int) -> bool:
        """Whether a rank is the first on its node: it has the host process there."""
        return tp_rank % self.ranks_per_node == 0

    def title(self, node: int) -> str:
        """`node 1 (host b)`."""
        return f"node {node} (host {self.parts[node].host})"


def nodes_of(ranks: Sequence[tuple[str, int | None]]) -> Nodes:
    """From host and GPU (None: CPU) of each rank, in the order of tp ranks.

    Raises:
        LayoutError: SGLang cannot place its processes so: it fills hosts one after the other, each with as many, on
            GPUs at equal steps.
    """
    hosts = [host for host, _ in ranks]
    names = list(dict.fromkeys(hosts))
    per_node = len(ranks) // len(names)
    if hosts != [name for name in names for _ in range(per_node)]:
        raise LayoutError(
            f"{WHERE}: its {len(ranks)} tp ranks lie on hosts {', '.join(hosts)}; needs as many on each host, one host "
            "after the other; move rollout.first_rank, or change rollout.tp or rollout.stride"
        )
    parts = [_node(name, [gpu for host, gpu in ranks if host == name]) for name in names]
    return Nodes(tuple(parts), per_node)


def _node(host: str, gpus: Sequence[int | None]) -> Node:
    indices = [gpu for gpu in gpus if gpu is not None]
    if not indices:
        return Node(host, 0, 1)
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step < 1 or indices != list(range(indices[0], indices[0] + len(indices) * step, step)):
        raise LayoutError(
            f"{WHERE}: its ranks on host {host} have GPUs {indices}; needs equal steps upwards; move "
            "rollout.first_rank or change rollout.stride"
        )
    return Node(host, indices[0], step)
