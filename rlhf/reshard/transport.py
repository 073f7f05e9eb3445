"""How packed bytes get from rank to rank, and the count of them. Knows no tensor's name and no layout."""

import queue
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from rlhf.errors import WeightSyncError
from rlhf.reshard.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Parcel:
    """A flat, contiguous tensor and the rank (of the job) that it goes to or comes from."""

    peer: int
    data: Tensor
    stable: bool = False
    """Sent from where it stays as it is until all ranks are done with the whole transfer."""


class Pending(Protocol):
    """Parcels under way."""

    def wait(self) -> None:
        """Return when all have arrived, or left: received data may be read, sent data overwritten."""


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank has received and sent so far, by link; counted for every parcel that is posted."""

    rank: int
    topology: Topology
    received: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))
    sent: dict[Link, int] = field(default_factory=lambda: dict.fromkeys(Link, 0))

    def count_received(self, parcel: Parcel) -> None:
        """Add a parcel to what came in."""
        self.received[self.topology.link(parcel.peer, self.rank)] += parcel.data.nbytes

    def count_sent(self, parcel: Parcel) -> None:
        """Add a parcel to what went out."""
        self.sent[self.topology.link(self.rank, parcel.peer)] += parcel.data.nbytes


class Transport(Protocol):
    """Moves parcels between this rank and others. Parcels of one pair arrive in the order in which they were posted."""

    @property
    def traffic(self) -> Traffic:
        """What has passed so far."""

    def post(self, receives: Sequence[Parcel], sends: Iterable[Parcel]) -> Pending:
        """Start receiving into, and sending from, the given tensors.

        `sends` may be lazy: each is started before the next is asked for where the backend allows it, so that packing
        overlaps sending.
        """


class GroupTransport:
    """torch.distributed point to point on a given group (gloo or NCCL), never on WORLD's own channels.

    Raises:
        WeightSyncError: This rank is not in the group, or the group is WORLD.
    """

    def __init__(self, group: ProcessGroup, topology: Topology) -> None:
        if dist.get_rank(group) < 0:
            raise WeightSyncError("reshard: this rank is not in the transfer group; needs a group of both pools")
        if group is dist.group.WORLD:
            raise WeightSyncError(
                "reshard: the transfer group is WORLD, which others use for their own traffic; needs its own; "
                "make one with GroupFactory"
            )
        self._group = group
        self._batched = dist.get_backend(group) == "nccl"
        self.traffic = Traffic(dist.get_rank(), topology)

    def post(self, receives: Sequence[Parcel], sends: Iterable[Parcel]) -> "Pending":
        """See `Transport.post`."""
        if self._batched:
            return self._post_together(receives, list(sends))
        works: list[Work | None] = []
        for parcel in receives:
            works.append(dist.irecv(parcel.data, src=parcel.peer, group=self._group))
            self.traffic.count_received(parcel)
        kept = []  # sent tensors live until they have left
        for parcel in sends:
            works.append(dist.isend(parcel.data, dst=parcel.peer, group=self._group))
            self.traffic.count_sent(parcel)
            kept.append(parcel)
        return _Works(works, kept)

    def _post_together(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> "Pending":
        """NCCL runs point-to-point calls in order on a stream; only one fused call cannot wait for itself."""
        ops = [P2POp(dist.irecv, p.data, p.peer, self._group) for p in receives]
        ops += [P2POp(dist.isend, p.data, p.peer, self._group) for p in sends]
        for parcel in receives:
            self.traffic.count_received(parcel)
        for parcel in sends:
            self.traffic.count_sent(parcel)
        return _Works(dist.batch_isend_irecv(ops) if ops else [], sends)


@dataclass(frozen=True, slots=True)
class _Works:
    works: Sequence[Work | None]
    kept: Sequence[Parcel]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:  # torch gives None to ranks outside the group
                work.wait()


class MemoryHub:
    """Ranks as threads of one process: what `GroupTransport` does, without a process group. For tests."""

    def __init__(self, topology: Topology, *, timeout_s: float = 30.0) -> None:
        self.topology, self.timeout_s = topology, timeout_s
        ranks = range(len(topology.nodes))
        self.boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {(a, b): queue.Queue() for a in ranks for b in ranks}

    def transport(self, rank: int) -> "MemoryTransport":
        """The end of one rank."""
        return MemoryTransport(self, rank)


class MemoryTransport:
    """One rank's end of a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self._hub = hub
        self.traffic = Traffic(rank, hub.topology)

    def post(self, receives: Sequence[Parcel], sends: Iterable[Parcel]) -> "Pending":
        """See `Transport.post`."""
        for parcel in sends:
            self._hub.boxes[self.traffic.rank, parcel.peer].put(parcel.data.clone())
            self.traffic.count_sent(parcel)
        for parcel in receives:
            self.traffic.count_received(parcel)
        return _Mail(self._hub, self.traffic.rank, receives)


@dataclass(frozen=True, slots=True)
class _Mail:
    hub: MemoryHub
    rank: int
    receives: Sequence[Parcel]

    def wait(self) -> None:
        for parcel in self.receives:
            try:
                found = self.hub.boxes[parcel.peer, self.rank].get(timeout=self.hub.timeout_s)
            except queue.Empty as error:
                raise WeightSyncError(f"reshard: rank {self.rank} waited in vain for rank {parcel.peer}") from error
            if found.shape != parcel.data.shape or found.dtype != parcel.data.dtype:
                raise WeightSyncError(
                    f"reshard: rank {parcel.peer} sent {tuple(found.shape)} {found.dtype}, rank {self.rank} waits for "
                    f"{tuple(parcel.data.shape)} {parcel.data.dtype}; the two ends have different plans"
                )
            parcel.data.copy_(found)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that `ModelLayout.dtype` names."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), f"{name} is no dtype"
    return found
