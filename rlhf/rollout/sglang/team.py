"""The ranks of one SGLang engine: the leader works, the others learn how it went."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.errors import EngineError, RlhfError

T = TypeVar("T")


class Team:
    """Ranks of a CPU group (gloo), the leader first; None is one rank alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_leader = self.rank == 0

    def together(self, work: Callable[[], T]) -> T | None:
        """Do something on the leader and give its value there, None elsewhere. Collective over the group.

        The others wait in a collective of host memory, with the group's time-out; never inside one of the device.

        Raises:
            EngineError, EngineLostError: The leader's work raised it, or something else that the leader gets as it was;
                on all ranks.
        """
        value: T | None = None
        told: list[EngineError | None] = [None]
        raised = None
        if self.is_leader:
            try:
                value = work()
            except Exception as error:
                if self._group is None:
                    raise
                raised = error
                told = [error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")]
        if self._group is not None:
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        if raised is not None:
            raise raised
        if told[0] is not None:
            raise told[0]
        return value

    def all(self, work: Callable[[], None]) -> None:
        """Do something on every rank of the engine. Collective over the group.

        Raises:
            RlhfError: The first rank's for which it failed; on all ranks, once each has tried.
        """
        failed: RlhfError | None = None
        try:
            work()
        except RlhfError as error:
            if self._group is None:
                raise
            failed = error
        if self._group is not None:
            told: list[RlhfError | None] = [None] * self.size
            dist.all_gather_object(told, failed, group=self._group)
            for one in told:
                if one is not None:
                    raise one

    def gpus(self, device: torch.device) -> tuple[int, int]:
        """(index of the leader's GPU, steps to the next rank's); (0, 1) on CPUs. Collective over the group.

        SGLang starts a process a rank itself, and is told only these two.

        Raises:
            EngineError: The ranks do not lie on one host, or their GPUs not at equal steps.
        """
        places = [(socket.gethostname(), device.index or 0)]
        if self._group is not None:
            own, places = places[0], places * self.size
            dist.all_gather_object(places, own, group=self._group)
        hosts, gpus = sorted({host for host, _ in places}), [index for _, index in places]
        if len(hosts) > 1:
            raise EngineError(
                f"sglang engine: its {self.size} ranks lie on hosts {', '.join(hosts)}; needs all on one; lower "
                "rollout.tp, or move rollout.first_rank"
            )
        if device.type == "cpu":
            return 0, 1
        step = gpus[1] - gpus[0] if self.size > 1 else 1
        if step < 1 or gpus != list(range(gpus[0], gpus[0] + self.size * step, step)):
            raise EngineError(
                f"sglang engine: its ranks have GPUs {gpus}; needs equal steps upwards; move rollout.first_rank or "
                "change rollout.stride"
            )
        return gpus[0], step
