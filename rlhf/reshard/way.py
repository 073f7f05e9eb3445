"""One rank's part of a standing transfer: agree on what is sent, move it, compare both sides."""

import time
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.errors import LayoutError, WeightSyncError
from rlhf.metrics.timers import SpanFn
from rlhf.reshard.bucket import check_ends, ends_of
from rlhf.reshard.check import Certificate, RankTraffic, check_arrivals, rank_traffic
from rlhf.reshard.endpoint import Endpoint, endpoint
from rlhf.reshard.execute import LocalParams, execute
from rlhf.reshard.near import near_transport
from rlhf.reshard.numbers import GroupNumbers
from rlhf.reshard.quarantine import Quarantine, listed
from rlhf.reshard.routes import Route, Routes, digest
from rlhf.reshard.stats import RankShare, ReshardStats
from rlhf.reshard.topology import Link
from rlhf.reshard.transport import GroupTransport, Transport
from rlhf.reshard.turn import EVERYTHING, SLICES, Turn
from rlhf.reshard.verify import NO_SUMS, Comparison, Mismatch, Verify
from rlhf.reshard.windows import WindowSink


class Way:
    """One rank's standing part of a transfer; made by all ranks of the group at once (see `WeightSync`)."""

    def __init__(
        self,
        routes: Routes,
        group: ProcessGroup,
        device: torch.device,
        *,
        near: bool,
        verify: Verify,
        quarantine: Quarantine,
        span: SpanFn,
    ) -> None:
        self._routes, self._device, self._span = routes, device, span
        self._plan, self._rank = routes.plan, dist.get_rank()
        self._verify, self._quarantine = verify, quarantine
        self._numbers = GroupNumbers(group, self._plan.ranks, device, span)
        self._comparison = Comparison(self._plan, routes.part, self._numbers.total)
        self._num_sampled = 0
        self.complete_next = True
        if tuple(sorted(dist.get_process_group_ranks(group))) != self._plan.ranks:
            raise WeightSyncError(
                f"reshard: the group holds ranks {sorted(dist.get_process_group_ranks(group))}; needs the ranks of "
                f"both pools, {list(self._plan.ranks)}; make the group from the two layouts"
            )
        self._transport: Transport = GroupTransport(group, self._plan.topology)
        if near:
            topology, gather = self._plan.topology, self._numbers.gather
            self._transport = near_transport(self._transport, group, topology, device, gather)

    @property
    def num_tensors(self) -> int:
        """Logical tensors of a complete transfer."""
        return self._routes.route().num_tensors

    def certify(self) -> Certificate:
        """Prove this rank's part, compare both ends of every pair, and gather all ranks' traffic. Collective."""
        check_arrivals(self._plan, self._routes.part)
        own, route = rank_traffic(self._plan, self._routes.part), self._routes.route()
        self._compare_ends(route)
        links = list(Link)
        row = [own.received[link] for link in links] + [own.sent[link] for link in links]
        rows = self._numbers.gather([*row, own.bound, own.far_bound, route.staging_bytes])
        traffic = tuple(
            RankTraffic(
                rank,
                dict(zip(links, row[:3], strict=True)),
                dict(zip(links, row[3:6], strict=True)),
                bound=row[6],
                far_bound=row[7],
            )
            for rank, row in zip(self._plan.ranks, rows, strict=True)
        )
        return Certificate(traffic, max(row[8] for row in rows))

    def run(
        self,
        src_params: Mapping[str, Tensor],
        dst_params: Mapping[str, Tensor] | WindowSink,
        changed: Collection[str] | None,
    ) -> ReshardStats:
        """See `WeightSync.update_weights`."""
        start = time.perf_counter()
        src, dst, route, is_fresh = self._agree(src_params, dst_params, changed)
        self.complete_next = True  # until all went well
        shares, found = self._transfer(route, src, dst, self._next_turn(is_fresh))
        differed = listed(found)
        if self._quarantine.admits_another_try(found):
            more, found = self._transfer(self._routes.route(), src, dst, EVERYTHING)
            shares = [one.with_another_try(other) for one, other in zip(shares, more, strict=True)]
        left_out = self._quarantine.left_out(found)
        self.complete_next = bool(left_out)
        return ReshardStats.of(
            dict(zip(self._plan.ranks, shares, strict=True)),
            seconds=time.perf_counter() - start,
            num_tensors=route.num_tensors,
            differed=differed,
            left_out=left_out,
        )

    def compare(
        self, src_params: Mapping[str, Tensor], dst_params: Mapping[str, Tensor] | WindowSink
    ) -> tuple[Mismatch, ...] | None:
        """See `WeightSync.compare`."""
        src, dst, route, is_fresh = self._agree(src_params, dst_params, ())
        if is_fresh:
            return None
        self.complete_next = True  # until all went well
        _, found = self._transfer(route, src, dst, EVERYTHING)
        self.complete_next = bool(found)
        return found

    def _next_turn(self, is_fresh: bool) -> Turn | None:
        """What this transfer compares: everything when the destination's weights are all new, else as configured."""
        if self._verify is not Verify.SAMPLE or is_fresh:
            return None if self._verify is Verify.NONE else EVERYTHING
        self._num_sampled += 1
        return Turn(self._num_sampled % SLICES)

    def _transfer(
        self, route: Route, src: LocalParams, dst: Endpoint, turn: Turn | None
    ) -> tuple[list[RankShare], tuple[Mismatch, ...]]:
        """Move the bytes, and see that they have arrived. Collective.

        Returns the shares of all ranks, and what differs of what the turn compares.
        """
        received, sent = dict(self._transport.traffic.received), sum(self._transport.traffic.sent.values())
        try:
            if self._routes.windowed:
                self._begin(route, dst)
            execute(
                route.buckets,
                src=src,
                dst=dst.into(route, src, self._device),
                transport=self._transport,
                staging=self._routes.staging,
                device=self._device,
                span=self._span,
            )
            received = {link: count - received[link] for link, count in self._transport.traffic.received.items()}
            received[Link.SAME_RANK] = sum(m.box.num_elements for m in route.part.copies) * route.item_bytes
            share = RankShare(
                received=received,
                sent=sum(self._transport.traffic.sent.values()) - sent,
                bound=route.bound,
                far_bound=route.far_bound,
                staging_bytes=self._routes.staging.num_bytes + route.region_bytes,
                staged_bytes=self._routes.staging.used_bytes + route.region_bytes,
            ).row()
            with self._span("sum weights"):
                # What was not sent is compared too: it shows a tensor that changed against the caller's word.
                sums = NO_SUMS if turn is None else self._comparison.sums(src, dst.sums, turn)
            rows = self._numbers.gather([*share, *sums.differences, dst.is_lost], "all done")
            self._check_none_lost([row.pop() for row in rows])
            totals = [sum(column) for column in zip(*(row[len(share) :] for row in rows), strict=True)]
            found = self._comparison.search(sums, totals, src, dst.sums)
            return [RankShare.of_row(row[: len(share)]) for row in rows], found
        finally:
            dst.end()

    def _check_none_lost(self, flags: Sequence[int]) -> None:
        """Raise WeightSyncError on all ranks where a destination was lost on the way; the others went on to here."""
        lost = [rank for rank, flag in zip(self._plan.ranks, flags, strict=True) if flag]
        if lost:
            raise WeightSyncError(
                f"reshard: the engine of rank {lost[0]} was lost while weights came, so no engine has them for sure; "
                "needs a complete transfer once it has been replaced; see the engine's log"
            )

    def _begin(self, route: Route, dst: Endpoint) -> None:
        """Every process behind a sink takes what will come, or all ranks raise. Collective."""
        try:
            dst.begin(route)
        except WeightSyncError:
            self._numbers.gather([1], "begin")
            raise
        rows = self._numbers.gather([0], "begin")
        refused = [rank for rank, row in zip(self._plan.ranks, rows, strict=True) if row[0]]
        if refused:
            raise WeightSyncError(
                f"reshard: the engine of rank {refused[0]} refuses what would come, so nothing was moved; its own "
                "error says why; needs the model that the layout describes"
            )

    def _agree(
        self,
        src_params: Mapping[str, Tensor],
        dst_params: Mapping[str, Tensor] | WindowSink,
        changed: Collection[str] | None,
    ) -> tuple[LocalParams, Endpoint, Route, bool]:
        """Before a byte moves: every rank has its parameters, and all send the same tensors. Collective.

        Last: whether a rank's destination may hold anything so far, so that all is sent whatever changed.
        """
        try:
            src = LocalParams(self._plan.src_index, self._rank, src_params, side="source")
            dst = endpoint(self._routes, self._rank, dst_params)
            chosen = None if changed is None else self._routes.known(changed)
        except LayoutError:
            self._numbers.gather([1, 0, 0, 0], "agree")
            raise
        is_fresh = self.complete_next or dst.needs_complete
        rows = self._numbers.gather([0, is_fresh, chosen is None, digest(chosen)], "agree")
        refused = [rank for rank, row in zip(self._plan.ranks, rows, strict=True) if row[0]]
        if refused:
            raise WeightSyncError(
                f"reshard: rank {refused[0]} refuses its parameters, so nothing was moved; its own error names the "
                "parameter; needs those that its layout describes"
            )
        is_fresh = any(row[1] for row in rows)
        if is_fresh or any(row[2] for row in rows):
            return src, dst, self._routes.route(), is_fresh
        other = [rank for rank, row in zip(self._plan.ranks, rows, strict=True) if row[3] != rows[0][3]]
        if other:
            raise WeightSyncError(
                f"reshard: ranks {self._plan.ranks[0]} and {other[0]} name different changed tensors; nothing was "
                "moved; needs one set on every rank; derive it from what all ranks know"
            )
        return src, dst, self._routes.route(chosen), False

    def _compare_ends(self, route: Route) -> None:
        """Raise WeightSyncError unless both ends of every pair of ranks have the same messages in mind."""
        ends = ends_of(route.receives, route.sends, self._rank, self._plan.ranks)
        check_ends(self._numbers.gather(ends), self._plan.ranks)
