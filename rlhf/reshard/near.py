"""Between ranks of one machine on CPUs: the receiver copies straight out of the sender's memory.

A socket takes each byte into the kernel and out again, and wakes both ends for every piece. Linux lets a process of
the same user read another's memory (process_vm_readv): one copy, by the receiver alone. Only addresses and receipts
still go through the group. Where the system refuses (a hardened ptrace scope, another container), the group carries the
bytes.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from rlhf.errors import PeerLostError
from rlhf.reshard.topology import Link, Topology
from rlhf.reshard.transport import GroupTransport, Parcel, Pending, Traffic, Transport

_NOTE_TAG, _RECEIPT_TAG = 1, 2
"""Keep notes and receipts between a pair of ranks apart, and from parcels, which have tag 0."""

NOTE_LENGTH = 128
"""Parcels that one note speaks of at most: (address, bytes) each; bytes are negative where a receipt is awaited."""


GatherFn = Callable[[list[int]], list[list[int]]]
"""The numbers of all ranks of the group, in order of rank. Collective."""


@dataclass(frozen=True, slots=True)
class NearPeers:
    """Whom a rank can read, and who can read it."""

    readable: Mapping[int, int]
    """Process id by rank."""
    readers: frozenset[int]


def near_transport(
    far: GroupTransport, group: ProcessGroup, topology: Topology, device: torch.device, gather: GatherFn
) -> Transport:
    """The group's transport, with near peers where there can be any: gloo, and memory of the host. Collective."""
    if device.type != "cpu" or dist.get_backend(group) != "gloo":
        return far
    ranks = sorted(dist.get_process_group_ranks(group))
    return NearTransport(far, group, find_near_peers(ranks, dist.get_rank(), topology, gather))


def find_near_peers(ranks: Sequence[int], rank: int, topology: Topology, gather: GatherFn) -> NearPeers:
    """Try which ranks of this rank's node let it read their memory. Collective over `ranks`, by `gather`."""
    token = torch.randint(1, 2**62, (1,), generator=torch.Generator().manual_seed(os.getpid()))
    told = dict(zip(ranks, gather([os.getpid(), token.data_ptr(), int(token)]), strict=True))
    pids: dict[int, int] = {}
    for peer, (pid, address, expected) in told.items():
        if topology.link(peer, rank) is Link.SAME_NODE:
            found = torch.zeros_like(token)
            if read_memory(pid, address, found) is None and int(found) == expected:
                pids[peer] = pid
    can_read = dict(zip(ranks, gather([int(peer in pids) for peer in ranks]), strict=True))
    at = list(ranks).index(rank)
    return NearPeers(pids, frozenset(peer for peer in ranks if can_read[peer][at]))


class NearTransport:
    """A `Transport` that lets receivers read where they can and leaves the rest to the group.

    A sender tells each reader, in notes, where its parcels of a bucket lie; a reader takes the next note of a peer when
    it has used up the last. Parcels that stay as they are until the transfer is over are read at any time until then;
    for others the sender waits for a receipt.
    """

    def __init__(self, far: GroupTransport, group: ProcessGroup, peers: NearPeers) -> None:
        self._far, self._group, self._peers = far, group, peers
        self._told: dict[int, deque[tuple[int, int]]] = {peer: deque() for peer in peers.readable}

    @property
    def traffic(self) -> Traffic:
        """See `Transport.traffic`: of both ways together."""
        return self._far.traffic

    def post(self, receives: Sequence[Parcel], sends: Iterable[Parcel]) -> Pending:
        """See `Transport.post`."""
        near = [parcel for parcel in receives if parcel.peer in self._peers.readable]
        for parcel in near:
            self.traffic.count_received(parcel)
        offers: dict[int, list[Parcel]] = {}
        far = self._far.post(
            [parcel for parcel in receives if parcel.peer not in self._peers.readable], self._offered(sends, offers)
        )
        return _Reads(self, near, far, [work for peer, parcels in offers.items() for work in self._tell(peer, parcels)])

    def read(self, parcel: Parcel) -> "_Sent | None":
        """Fill a parcel from its sender's memory; the receipt under way, if the sender waits for one."""
        told = self._told[parcel.peer]
        if not told:
            note = torch.empty(1 + 2 * NOTE_LENGTH, dtype=torch.int64)
            dist.recv(note, src=parcel.peer, group=self._group, tag=_NOTE_TAG)
            count, *entries = note.tolist()
            told.extend(zip(entries[0 : 2 * count : 2], entries[1 : 2 * count : 2], strict=True))
        address, num_bytes = told.popleft()
        assert abs(num_bytes) == parcel.data.nbytes, "both ends of a pair planned different messages"
        fault = read_memory(self._peers.readable[parcel.peer], address, parcel.data)
        if fault is not None:
            raise PeerLostError(
                f"reshard: rank {self.traffic.rank} cannot read the memory of rank {parcel.peer}: {fault}; needs that "
                "rank alive; look into its log"
            )
        return self._send(torch.ones(1), parcel.peer, _RECEIPT_TAG) if num_bytes < 0 else None

    def _offered(self, sends: Iterable[Parcel], offers: dict[int, list[Parcel]]) -> Iterator[Parcel]:
        """Set aside what others will read; the rest is for the group."""
        for parcel in sends:
            if parcel.peer in self._peers.readers:
                offers.setdefault(parcel.peer, []).append(parcel)
                self.traffic.count_sent(parcel)
            else:
                yield parcel

    def _tell(self, peer: int, parcels: Sequence[Parcel]) -> "Iterator[_Sent]":
        for first in range(0, len(parcels), NOTE_LENGTH):
            some = parcels[first : first + NOTE_LENGTH]
            note = torch.zeros(1 + 2 * NOTE_LENGTH, dtype=torch.int64)
            entries = [(one.data.data_ptr(), one.data.nbytes if one.stable else -one.data.nbytes) for one in some]
            note[: 1 + 2 * len(some)] = torch.tensor([len(some), *chain.from_iterable(entries)])
            yield self._send(note, peer, _NOTE_TAG)
        for parcel in parcels:
            if not parcel.stable:
                receipt = torch.empty(1)
                yield _Sent((parcel, receipt), dist.irecv(receipt, src=peer, group=self._group, tag=_RECEIPT_TAG))

    def _send(self, data: Tensor, peer: int, tag: int) -> "_Sent":
        return _Sent(data, dist.isend(data, dst=peer, group=self._group, tag=tag))


@dataclass(frozen=True, slots=True)
class _Sent:
    """Something under way through the group, with the memory that it needs until then."""

    kept: object
    work: Work | None


@dataclass(slots=True)
class _Reads:
    """Parcels of one bucket, of which some are read from their senders' memory."""

    transport: NearTransport
    incoming: Sequence[Parcel]
    far: Pending
    under_way: list[_Sent]

    def wait(self) -> None:
        """See `Pending.wait`. Reads come first, in their order: others may wait for them before they go on."""
        for parcel in self.incoming:
            receipt = self.transport.read(parcel)
            if receipt is not None:
                self.under_way.append(receipt)
        self.far.wait()
        for one in self.under_way:
            if one.work is not None:  # torch gives None to ranks outside the group
                one.work.wait()


class _Block(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: Tensor) -> str | None:
    """Fill a contiguous tensor in host memory from an address of another process; None, or what the system says.

    Source: process_vm_readv(2).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system has no process_vm_readv"
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done, count = 0, ctypes.c_ulong(1)
    while done < into.nbytes:
        here = _Block(into.data_ptr() + done, into.nbytes - done)
        there = _Block(address + done, into.nbytes - done)
        read = libc.process_vm_readv(
            ctypes.c_int(pid), ctypes.byref(here), count, ctypes.byref(there), count, ctypes.c_ulong(0)
        )
        if read <= 0:
            return os.strerror(ctypes.get_errno()) if read else "nothing there"
        done += read
    return None
