"""What a transfer did, over all ranks: bytes where they moved, against the least that had to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.reshard.check import ratio
from rlhf.reshard.quarantine import Engine
from rlhf.reshard.topology import Link


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of a transfer, in bytes, counted as it was carried out."""

    received: Mapping[Link, int]
    """By link; SAME_RANK are copies inside the rank."""
    sent: int
    """To other ranks."""
    bound: int
    """Of distinct elements that it wants, does not hold, and that had to move this time."""
    far_bound: int
    """The part of the bound that no rank of its node holds; see `RankTraffic.far_bound`."""
    staging_bytes: int
    """Memory that was allocated beside the parameters, buffers kept from earlier transfers included."""
    staged_bytes: int
    """Most of it that was in use at one time."""

    @property
    def moved(self) -> int:
        """Bytes that came from other ranks."""
        return self.received[Link.SAME_NODE] + self.received[Link.ACROSS_NODES]

    def with_another_try(self, other: "RankShare") -> "RankShare":
        """The same transfer after a second try: what moved is counted twice, what had to move is not."""
        return replace(
            self,
            received={link: count + other.received[link] for link, count in self.received.items()},
            sent=self.sent + other.sent,
            staging_bytes=max(self.staging_bytes, other.staging_bytes),
            staged_bytes=max(self.staged_bytes, other.staged_bytes),
        )

    def row(self) -> list[int]:
        """As numbers, for a gather."""
        received = [self.received[link] for link in Link]
        return [*received, self.sent, self.bound, self.far_bound, self.staging_bytes, self.staged_bytes]

    @staticmethod
    def of_row(row: Sequence[int]) -> "RankShare":
        """Back from `row`."""
        links = len(Link)
        return RankShare(dict(zip(Link, row[:links], strict=True)), *row[links:])


@dataclass(frozen=True, slots=True)
class ReshardStats:
    """One transfer, over all ranks of both pools. Bytes are counted where they moved."""

    received: Mapping[Link, int]
    """By link; SAME_RANK are copies inside a rank. A rank of neither pool has zeros."""
    bound: int
    """The least number of bytes that had to pass between ranks."""
    seconds: float
    """From this rank's call until all ranks were done."""
    far_bound: int = 0
    """The least number of bytes that had to pass between nodes, with the fanout chosen."""
    most_received: int = 0
    """Bytes that the rank that got most got from other ranks."""
    most_received_rank: int = -1
    """That rank."""
    most_sent: int = 0
    """Bytes that the rank that sent most sent."""
    most_sent_rank: int = -1
    """That rank."""
    staging_bytes: int = 0
    """Most memory that a rank allocated beside the parameters."""
    staged_bytes: int = 0
    """Most of it that a rank used at one time."""
    num_tensors: int = 0
    """Logical tensors that were sent; the others were unchanged."""
    differed: str = ""
    """What differed, so that everything was sent a second time, counted in the bytes above; empty: nothing did."""
    left_out: tuple[Engine, ...] = ()
    """Engines that hold other weights than their sources even so, and must not be used until the next transfer."""

    @staticmethod
    def of(
        shares: Mapping[int, RankShare],
        *,
        seconds: float,
        num_tensors: int,
        differed: str = "",
        left_out: tuple[Engine, ...] = (),
    ) -> "ReshardStats":
        """From the shares of all ranks."""
        most_in = max(shares, key=lambda rank: shares[rank].moved)
        most_out = max(shares, key=lambda rank: shares[rank].sent)
        return ReshardStats(
            received={link: sum(one.received[link] for one in shares.values()) for link in Link},
            bound=sum(one.bound for one in shares.values()),
            seconds=seconds,
            far_bound=sum(one.far_bound for one in shares.values()),
            most_received=shares[most_in].moved,
            most_received_rank=most_in,
            most_sent=shares[most_out].sent,
            most_sent_rank=most_out,
            staging_bytes=max(one.staging_bytes for one in shares.values()),
            staged_bytes=max(one.staged_bytes for one in shares.values()),
            num_tensors=num_tensors,
            differed=differed,
            left_out=left_out,
        )

    def leaves_out(self, rank: int) -> bool:
        """Whether a rank belongs to an engine that is left out."""
        return any(rank in engine for engine in self.left_out)

    @property
    def moved(self) -> int:
        """Bytes that passed between ranks."""
        return self.received[Link.SAME_NODE] + self.received[Link.ACROSS_NODES]

    @property
    def ratio(self) -> float:
        """Moved over bound."""
        return ratio(self.moved, self.bound)

    @property
    def far_ratio(self) -> float:
        """Moved between nodes over the bound between nodes."""
        return ratio(self.received[Link.ACROSS_NODES], self.far_bound)


NOTHING_MOVED = ReshardStats(dict.fromkeys(Link, 0), 0, 0.0)
"""Of a rank that is in neither pool."""
