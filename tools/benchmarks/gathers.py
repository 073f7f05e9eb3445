"""Three ways to move weights by whole copies, which ours is compared with: gather every shard, then slice.

Each is given what makes it fast: a source rank's parameters lie end to end in one buffer, as in Megatron's own, so
nothing is packed; buffers for the whole model are kept from run to run; large transfers are cut for gloo's best rate.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.reshard.layout import Box, ModelLayout, ParamLayout

CHUNK_ELEMENTS = 64 * 2**20 // 4
"""64 MiB of float32, gloo's best size."""


def param_shapes(held: Sequence[ParamLayout]) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a shard, padding left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in held:
        stops = tuple(stop for _, stop in piece.param_box(piece.box).spans)
        before = shapes.get(piece.param, (0,) * len(stops))
        shapes[piece.param] = tuple(map(max, before, stops))
    return shapes


def flat_params(held: Sequence[ParamLayout], flat: Tensor) -> dict[str, Tensor]:
    """A shard's parameters as views of one buffer, one after the other."""
    found, at = {}, 0
    for name, shape in param_shapes(held).items():
        count = torch.Size(shape).numel()
        found[name] = flat[at : at + count].view(shape)
        at += count
    return found


def shard_elements(held: Sequence[ParamLayout]) -> int:
    """Elements of a shard's buffer."""
    return sum(torch.Size(shape).numel() for shape in param_shapes(held).values())


@dataclass(frozen=True, slots=True)
class Shards:
    """One replica of the source: which rank has which shard. The same on every rank of the replica."""

    ranks: tuple[int, ...]
    num_elements: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Elements of the largest; buffers are as long as this."""
        return max(self.num_elements)


class WholeCopy(ABC):
    """Whole shards of one source replica on every rank of it, and the slicing that follows. Subclasses gather."""

    name = ""

    def __init__(
        self,
        src: ModelLayout,
        dst: ModelLayout,
        *,
        shards: Shards,
        group: ProcessGroup,
        own: Tensor,
        full: Tensor,
        landed: Mapping[str, Tensor],
    ) -> None:
        """Prepare the views.

        Args:
            src: Layout of the source; this rank is in its pool and in that of `dst`.
            dst: Layout of the destination.
            shards: This rank's replica of the source.
            group: The ranks of that replica.
            own: This rank's shard, [longest].
            full: Buffer for all shards, [shards, longest]; methods that run in turn may share it.
            landed: This rank's destination parameters.
        """
        self._shards, self._group, self._own, self._full = shards, group, own, full
        self._me = shards.ranks.index(dist.get_rank())
        self._slices = _slices(src, dst, shards, full, landed)

    def run(self) -> None:
        """Fill the destination. Collective over the group."""
        self.gather()
        for target, source in self._slices:
            target.copy_(source)

    @abstractmethod
    def gather(self) -> None:
        """Fill `full`."""

    def received_bytes(self) -> int:
        """Bytes that this rank receives in one run."""
        others = [count for at, count in enumerate(self._shards.num_elements) if at != self._me]
        return 4 * sum(others)

    def _pieces(self, shard: int) -> list[tuple[int, int]]:
        count = self._shards.num_elements[shard]
        return [(at, min(at + CHUNK_ELEMENTS, count)) for at in range(0, count, CHUNK_ELEMENTS)]


class AllGather(WholeCopy):
    """One all-gather of shards (padded to the longest, for gloo takes equal sizes only)."""

    name = "all-gather"

    def gather(self) -> None:
        """See `WholeCopy`."""
        longest = self._shards.longest
        for at in range(0, longest, CHUNK_ELEMENTS):
            piece = slice(at, min(at + CHUNK_ELEMENTS, longest))
            dist.all_gather([row[piece] for row in self._full], self._own[piece], group=self._group)

    def received_bytes(self) -> int:
        """See `WholeCopy`."""
        return 4 * self._shards.longest * (len(self._shards.ranks) - 1)


class Broadcast(WholeCopy):
    """Each rank broadcasts its shard."""

    name = "broadcast"

    def gather(self) -> None:
        """See `WholeCopy`."""
        self._full[self._me].copy_(self._own)
        works = [
            dist.broadcast(self._full[shard][start:stop], src=rank, group=self._group, async_op=True)
            for shard, rank in enumerate(self._shards.ranks)
            for start, stop in self._pieces(shard)
        ]
        for work in works:
            work.wait()


class PointToPoint(WholeCopy):
    """Each rank sends its shard to every other."""

    name = "p2p gather"

    def gather(self) -> None:
        """See `WholeCopy`."""
        works, count = [], len(self._shards.ranks)
        for turn in range(1, count):  # the n-th neighbours at a time, so that nobody is sent to by everybody at once
            before, after = (self._me - turn) % count, (self._me + turn) % count
            works += [
                dist.irecv(self._full[before][a:b], src=self._shards.ranks[before], group=self._group)
                for a, b in self._pieces(before)
            ]
            works += [
                dist.isend(self._own[a:b], dst=self._shards.ranks[after], group=self._group)
                for a, b in self._pieces(self._me)
            ]
        self._full[self._me].copy_(self._own)
        for work in works:
            if work is not None:
                work.wait()


WAYS: tuple[type[WholeCopy], ...] = (AllGather, Broadcast, PointToPoint)


def _slices(
    src: ModelLayout, dst: ModelLayout, shards: Shards, full: Tensor, landed: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(block of the destination, the same block in the gathered shards), each wanted element once."""
    sources: dict[str, list[tuple[ParamLayout, Tensor]]] = {}
    for shard, rank in enumerate(shards.ranks):
        params = flat_params(src.holdings(rank), full[shard])
        for piece in src.holdings(rank):
            sources.setdefault(piece.tensor, []).append((piece, params[piece.param]))
    found = []
    for want in dst.holdings(dist.get_rank()):
        wanted = [want.box]
        for held, param in sources[want.tensor]:
            rest: list[Box] = []
            for box in wanted:
                common = box.intersect(held.box)
                if common is not None:
                    target = landed[want.param][want.param_box(common).slices]
                    found.append((target, param[held.param_box(common).slices]))
                rest += box.minus(held.box)
            wanted = rest
        assert not wanted, f"{want.tensor} is not whole in the replica"
    return found
