"""What the machine allows, whatever the software: the same bytes point to point, unpacked; one copy of each shard."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.reshard.plan import Plan
from tools.benchmarks.gathers import CHUNK_ELEMENTS


class PeerLimit:
    """Each pair of ranks exchanges as many bytes as in a plan, end to end, cut for gloo's best rate."""

    def __init__(self, plan: Plan, group: ProcessGroup, scratch: Tensor) -> None:
        """`scratch`: flat, with room for all that this rank sends and receives; its content is lost."""
        part, self._group = plan.of(dist.get_rank()), group
        incoming, outgoing = dict.fromkeys(plan.ranks, 0), dict.fromkeys(plan.ranks, 0)
        for move in part.receives:
            incoming[move.src_rank] += move.box.num_elements
        for move in part.sends:
            outgoing[move.dst_rank] += move.box.num_elements
        assert sum(incoming.values()) + sum(outgoing.values()) <= scratch.numel(), "the scratch buffer is too small"
        self._receives, rest = _cut(incoming, scratch)
        self._sends, _ = _cut(outgoing, rest)
        me, count = plan.ranks.index(dist.get_rank()), len(plan.ranks)
        self._turns = [(plan.ranks[(me - turn) % count], plan.ranks[(me + turn) % count]) for turn in range(1, count)]

    def run(self) -> None:
        """Collective over the ranks of the plan."""
        works = []
        for before, after in self._turns:
            works += [dist.irecv(piece, src=before, group=self._group) for piece in self._receives[before]]
            works += [dist.isend(piece, dst=after, group=self._group) for piece in self._sends[after]]
        for work in works:
            if work is not None:
                work.wait()


class CopyLimit:
    """Each rank writes as many elements as its destination parameters have, once, from its own memory."""

    def __init__(self, landed: Sequence[Tensor], scratch: Tensor) -> None:
        self._landed, self._scratch = [tensor.view(-1) for tensor in landed], scratch

    def run(self) -> None:
        """Local."""
        at = 0
        for flat in self._landed:
            at = 0 if at + flat.numel() > self._scratch.numel() else at
            flat.copy_(self._scratch[at : at + flat.numel()])
            at += flat.numel()


def _cut(sizes: dict[int, int], flat: Tensor) -> tuple[dict[int, list[Tensor]], Tensor]:
    """For each peer pieces of the buffer that hold its elements; and what is left."""
    found, at = {}, 0
    for peer, count in sizes.items():
        found[peer] = list(flat[at : at + count].split(CHUNK_ELEMENTS)) if count else []
        at += count
    return found, flat[at:]
