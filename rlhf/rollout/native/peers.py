"""What the ranks of one engine say to each other: partial sums, logits, tokens, prompts. Silent when there is one."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.errors import EngineError

T = TypeVar("T")


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

    def share(self, numbers: Tensor) -> Tensor:
        """The leader's int64 numbers in host memory on every rank, in place. Collective over the engine."""
        if self.size > 1:
            dist.broadcast(numbers, group=self._cpu_group, group_src=0)
        return numbers

    def together(self, work: Callable[[], T]) -> T | None:
        """Do something on the leader and give its value there, None elsewhere. Collective over the engine.

        Raises:
            EngineError: The leader's work raised it; on all ranks.
        """
        value, told = None, [""]
        if self.is_leader:
            try:
                value = work()
            except EngineError as error:
                if self.size == 1:
                    raise
                told = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(told, group=self._cpu_group, group_src=0)
        if told[0]:
            raise EngineError(told[0])
        return value
