"""What the ranks of one engine say to each other: partial sums, logits, tokens, prompts. Silent when there is one."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Peers:
    """The tensor-parallel ranks of an engine; the leader is rank 0 of the group."""

    def __init__(self, tp_group: ProcessGroup | None, cpu_group: ProcessGroup | None) -> None:
        self._device_group, self._cpu_group = tp_group, cpu_group
        self.size = 1 if tp_group is None else tp_group.size()
        self.rank = 0 if tp_group is None else tp_group.rank()
        assert self.size == 1 or (cpu_group is not None and cpu_group.size() == self.size), "groups differ"

    @property
    def is_leader(self) -> bool:
        """Whether rows go in and out on this rank."""
        return self.rank == 0

    def add_up(self, partial: Tensor) -> Tensor:
        """Sum over the ranks, in place. Collective over the engine."""
        if self.size > 1:
            dist.all_reduce(partial, group=self._device_group)
        return partial

    def gather_logits(self, logits: Tensor) -> Tensor | None:
        """Logits [rows, vocabulary] of all ranks side by side, on the leader. Collective over the engine."""
        if self.size == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.size)] if self.is_leader else None
        dist.gather(logits, parts, group=self._device_group, group_dst=0)
        return None if parts is None else torch.cat(parts, 1)

    def share_tokens(self, tokens: Tensor) -> Tensor:
        """The leader's tokens (device, int64) on every rank, in place. Collective over the engine."""
        if self.size > 1:
            dist.broadcast(tokens, group=self._device_group, group_src=0)
        return tokens

    def share_rows(self, vectors: tuple[Tensor, ...] | None, *, count: int) -> tuple[Tensor, ...]:
        """The leader's `count` int64 vectors (host memory, any lengths) on every rank. Collective over the engine."""
        if self.size == 1:
            assert vectors is not None, "the leader has the rows"
            return vectors
        sizes = torch.tensor([v.numel() for v in vectors]) if vectors is not None else torch.zeros(count).long()
        dist.broadcast(sizes, group=self._cpu_group, group_src=0)
        flat = torch.cat(vectors) if vectors is not None else torch.empty(int(sizes.sum()), dtype=torch.int64)
        dist.broadcast(flat, group=self._cpu_group, group_src=0)
        return flat.split(sizes.tolist())
