"""Moves a model's weights from one layout into another, as often as asked, by a plan that is made and proved once."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.errors import WeightSyncError
from rlhf.metrics.timers import Kind, SpanFn, no_span
from rlhf.reshard.bucket import buckets_of, digests, messages_of
from rlhf.reshard.check import Certificate, RankTraffic, check_arrivals, rank_traffic, ratio
from rlhf.reshard.execute import LocalParams, Params, Staging, execute
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import Plan, make_plan
from rlhf.reshard.topology import Link, Topology
from rlhf.reshard.transport import GroupTransport
from rlhf.reshard.verify import compare_weights

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""Large enough for gloo's best rate (64 MiB), small beside a shard."""


@dataclass(frozen=True, slots=True)
class ReshardStats:
    """One transfer, over all ranks of both pools. Bytes are counted where they moved."""

    received: Mapping[Link, int]
    """By link; SAME_RANK are copies inside a rank. A rank of neither pool has zeros."""
    bound: int
    """The least number of bytes that must pass between ranks."""
    seconds: float
    """From this rank's call until all ranks were done."""

    @property
    def moved(self) -> int:
        """Bytes that passed between ranks."""
        return self.received[Link.SAME_NODE] + self.received[Link.ACROSS_NODES]

    @property
    def ratio(self) -> float:
        """Moved over bound."""
        return ratio(self.moved, self.bound)


class WeightSync:
    """The standing transfer between two layouts of one model.

    Making it is collective over `group`, which holds exactly the ranks of both pools; a rank of neither pool passes
    `group=None`, and all its calls return at once. `src` and `dst` are the same on every rank. `device` is where the
    group's transport works (default: CPU, for gloo); parameters may lie elsewhere. With `verify`, each transfer ends
    with a comparison of checksums taken from the parameters of both sides (one more read of each, one small gather).

    Raises:
        LayoutError: The layouts do not fit each other (named, the same on every rank).
        WeightSyncError: The group is not that of the pools, or two ranks came to different plans.
    """

    def __init__(
        self,
        src: ModelLayout,
        dst: ModelLayout,
        *,
        topology: Topology,
        group: ProcessGroup | None,
        device: torch.device | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        verify: bool = True,
        span: SpanFn = no_span,
    ) -> None:
        plan = make_plan(src, dst, topology)
        self.certificate: Certificate | None = None
        """Of the whole transfer; None on a rank of neither pool."""
        self._route: _Route | None = None
        if group is not None:
            self._route = _Route(plan, group, device or torch.device("cpu"), bucket_bytes, verify=verify, span=span)
            self.certificate = self._route.certify()

    def update_weights(self, src_params: Mapping[str, Tensor], dst_params: Mapping[str, Tensor]) -> ReshardStats:
        """Fill the destination parameters from the source parameters. Collective over the group.

        The caller has synchronised the source parameters; they are read as they are. A rank outside one of the pools
        passes an empty mapping for it.

        Raises:
            LayoutError: A parameter is missing, too small, or of another dtype than its layout says.
            WeightSyncError: The two sides do not hold the same weights afterwards; on all ranks.
        """
        if self._route is None:
            return ReshardStats(dict.fromkeys(Link, 0), 0, 0.0)
        return self._route.run(src_params, dst_params)


class _Route:
    """One rank's part of a transfer, ready to run."""

    def __init__(
        self, plan: Plan, group: ProcessGroup, device: torch.device, bucket_bytes: int, *, verify: bool, span: SpanFn
    ) -> None:
        self._plan, self._group, self._device, self._verify, self._span = plan, group, device, verify, span
        self._rank = dist.get_rank()
        if tuple(sorted(dist.get_process_group_ranks(group))) != plan.ranks:
            raise WeightSyncError(
                f"reshard: the group holds ranks {sorted(dist.get_process_group_ranks(group))}; needs the ranks of "
                f"both pools, {list(plan.ranks)}; make the group from the two layouts"
            )
        self._part = plan.of(self._rank)
        self._receives, self._sends = messages_of(plan, self._part, bucket_bytes)
        self._buckets = buckets_of(self._receives, self._sends, max(1, bucket_bytes // plan.src.item_bytes))
        self._staging = Staging(self._buckets, plan.src.dtype)
        self._transport = GroupTransport(group, plan.topology)
        self._bound = 0

    def certify(self) -> Certificate:
        """Prove this rank's part, compare both ends of every pair, and gather all ranks' traffic. Collective."""
        check_arrivals(self._plan, self._part)
        own = rank_traffic(self._plan, self._part)
        self._compare_ends()
        links = list(Link)
        row = [own.received[link] for link in links] + [own.sent[link] for link in links]
        rows = self._gather([*row, own.bound, self._staging.num_bytes])
        traffic = tuple(
            RankTraffic(
                rank,
                dict(zip(links, row[:3], strict=True)),
                dict(zip(links, row[3:6], strict=True)),
                row[6],
            )
            for rank, row in zip(self._plan.ranks, rows, strict=True)
        )
        certificate = Certificate(traffic, max(row[7] for row in rows))
        self._bound = certificate.bound
        return certificate

    def run(self, src_params: Mapping[str, Tensor], dst_params: Mapping[str, Tensor]) -> ReshardStats:
        """See `WeightSync.update_weights`."""
        start = time.perf_counter()
        before = dict(self._transport.traffic.received)
        src = LocalParams(self._plan.src_index, self._rank, src_params, side="source")
        dst = LocalParams(self._plan.dst_index, self._rank, dst_params, side="destination")
        execute(
            self._buckets,
            src=src,
            dst=Params(self._part, src, dst, self._device),
            transport=self._transport,
            staging=self._staging,
            device=self._device,
            span=self._span,
        )
        if self._verify:
            with self._span("compare weights"):
                compare_weights(self._plan, self._part, src=src, dst=dst, gather=self._gather)
        received = {link: count - before[link] for link, count in self._transport.traffic.received.items()}
        received[Link.SAME_RANK] = sum(m.box.num_elements for m in self._part.copies) * self._plan.src.item_bytes
        totals = torch.tensor([received[link] for link in Link], dtype=torch.int64, device=self._device)
        with self._span("all done", Kind.WAIT):
            dist.all_reduce(totals, group=self._group)
        counted = dict(zip(Link, totals.tolist(), strict=True))
        return ReshardStats(counted, self._bound, time.perf_counter() - start)

    def _compare_ends(self) -> None:
        """Raise WeightSyncError unless both ends of every pair of ranks have the same messages in mind."""
        outgoing, incoming = digests(self._sends), digests(self._receives)
        ranks, me = self._plan.ranks, self._rank
        rows = self._gather([*(outgoing.get((me, r), 0) for r in ranks), *(incoming.get((r, me), 0) for r in ranks)])
        count = len(ranks)
        for a, sender in enumerate(ranks):
            for b, receiver in enumerate(ranks):
                if rows[a][b] != rows[b][count + a]:
                    raise WeightSyncError(
                        f"reshard: ranks {sender} and {receiver} planned different messages; needs the same layouts, "
                        "topology and bucket size on every rank; compare their configs and code"
                    )

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of all ranks of the group, in order of rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        rows = [torch.empty_like(own) for _ in self._plan.ranks]
        with self._span("gather numbers", Kind.WAIT):
            dist.all_gather(rows, own, group=self._group)
        of_rank = dict(zip(dist.get_process_group_ranks(self._group), rows, strict=True))
        return [of_rank[rank].tolist() for rank in self._plan.ranks]
