"""The ranks of one SGLang engine: the leader works, the others learn how it went."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.errors import EngineError, EngineLostError, RlhfError
from rlhf.rollout.sglang.multi_host.nodes import Nodes, nodes_of

T = TypeVar("T")


class Team:
    """Ranks of a CPU group (gloo), the leader first; None is one rank alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_leader = self.rank == 0
        self._nodes: Nodes | None = None
        self._witness: Callable[[], str] = str

    def ask_witnesses(self, nodes: Nodes, witness: Callable[[], str]) -> None:
        """From now on a loss is told with what the first rank of each other node has seen: `witness`, called there."""
        self._nodes, self._witness = nodes, witness

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
        if isinstance(told[0], EngineLostError):
            raise self._with_witnesses(told[0])
        if raised is not None:
            raise raised
        if told[0] is not None:
            raise told[0]
        return value

    def _with_witnesses(self, error: EngineLostError) -> EngineLostError:
        """The leader's error and what happened on other nodes, which may be its cause. Collective over the group."""
        nodes = self._nodes
        if nodes is None or len(nodes.parts) == 1:
            return error
        said = [""] * self.size
        asked = nodes.leads(self.rank) and not self.is_leader
        dist.all_gather_object(said, self._witness() if asked else "", group=self._group)
        more = [f"{nodes.title(nodes.of(rank))}: {text}" for rank, text in enumerate(said) if text]
        return EngineLostError("\n".join([str(error), *more]))

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

    def tell(self, value: T | None) -> T:
        """The leader's value, on every rank. Collective over the group."""
        told = [value]
        if self._group is not None:
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        assert told[0] is not None, "the leader has a value"
        return told[0]

    def total(self, count: int) -> int:
        """The sum of all ranks' counts, on every rank; none goes on before each has come. Collective over the group."""
        cell = torch.tensor([count], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(cell, group=self._group)
        return int(cell[0])

    def on_nodes(self, nodes: Nodes, work: Callable[[], None]) -> None:
        """Do something on the first rank of each node, at the same time. Collective over the group.

        Raises:
            EngineError, EngineLostError: What the work raised on some of them, each with its node's name, or something
                else that they get as it was; on all ranks.
        """
        failed: EngineError | None = None
        raised: Exception | None = None
        if nodes.leads(self.rank):
            try:
                work()
            except Exception as error:
                if self._group is None:
                    raise
                raised = error
                failed = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        told = [failed] * self.size
        if self._group is not None:
            dist.all_gather_object(told, failed, group=self._group)
        if raised is not None and not isinstance(raised, EngineError):
            raise raised
        errors = {rank: error for rank, error in enumerate(told) if error is not None}
        if len(nodes.parts) == 1 and errors:
            raise errors[0]
        if errors:
            kind = EngineLostError if any(isinstance(one, EngineLostError) for one in errors.values()) else EngineError
            raise kind("\n".join(f"{nodes.title(nodes.of(rank))}: {error}" for rank, error in errors.items()))

    def nodes(self, device: torch.device, host: str) -> Nodes:
        """On which hosts and GPUs the ranks lie; `host`: the name of this rank's. Collective over the group.

        Raises:
            LayoutError: SGLang cannot place its processes so.
        """
        own = (host, device.index or 0 if device.type == "cuda" else None)
        places: list[tuple[str, int | None]] = [own] * self.size
        if self._group is not None:
            dist.all_gather_object(places, own, group=self._group)
        return nodes_of(places)
