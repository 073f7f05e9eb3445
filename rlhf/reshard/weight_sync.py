"""Moves a model's weights from one layout into another, as often as asked, by a plan that is made and proved once."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.metrics.timers import SpanFn, no_span
from rlhf.reshard.check import Certificate
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.quarantine import Engine, OnMismatch, Quarantine
from rlhf.reshard.routes import RouteCache
from rlhf.reshard.stats import NOTHING_MOVED, ReshardStats
from rlhf.reshard.topology import Fanout, Topology
from rlhf.reshard.verify import Mismatch, Verify
from rlhf.reshard.way import Way
from rlhf.reshard.windows import WindowSink

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""Large enough for gloo's best rate (64 MiB), small beside a shard."""


class WeightSync:
    """The standing transfer between two layouts of one model.

    Making it is collective over `group`, which holds exactly the ranks of both pools; a rank of neither pool passes
    `group=None`, and all its calls return at once. `src` and `dst` are the same on every rank. `device` is where the
    group's transport works (default: CPU, for gloo); parameters may lie elsewhere. A transfer ends with a comparison of
    checksums taken from the parameters of both sides, as far as `verify` says; `on_mismatch` says what follows a
    difference, for the `engines` concerned (destination ranks that are right or wrong together; default: each by
    itself). With `windowed`, the same on every rank, the destination's parameters are those of other processes, each
    behind a `WindowSink`. With `near`, ranks of one machine on CPUs read each other's memory where the system lets them
    (`near.py`). Transfers made with one `cache`, on every rank alike, share plan and buffers when their layouts say the
    same; they must not run at the same time.

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
        fanout: Fanout = Fanout.DIRECT,
        windowed: bool = False,
        near: bool = True,
        verify: Verify = Verify.SAMPLE,
        on_mismatch: OnMismatch = OnMismatch.STOP,
        engines: Sequence[Engine] = (),
        cache: RouteCache | None = None,
        span: SpanFn = no_span,
    ) -> None:
        self.certificate: Certificate | None = None
        """Of a complete transfer; None on a rank of neither pool."""
        self._way: Way | None = None
        if group is None:
            make_plan(src, dst, topology, fanout=fanout)  # refuses what the others refuse
        else:
            cache = cache or RouteCache()
            routes = cache.routes(
                src, dst, topology, fanout, rank=dist.get_rank(), bucket_bytes=bucket_bytes, windowed=windowed
            )
            quarantine = Quarantine(on_mismatch, engines or [(rank,) for rank in dst.ranks])
            device = device or torch.device("cpu")
            self._way = Way(routes, group, device, near=near, verify=verify, quarantine=quarantine, span=span)
            self.certificate = self._way.certify()

    @property
    def num_tensors(self) -> int:
        """Logical tensors of a complete transfer; 0 on a rank of neither pool."""
        return 0 if self._way is None else self._way.num_tensors

    def update_weights(
        self,
        src_params: Mapping[str, Tensor],
        dst_params: Mapping[str, Tensor] | WindowSink,
        *,
        changed: Collection[str] | None = None,
    ) -> ReshardStats:
        """Fill the destination parameters from the source parameters. Collective over the group.

        The caller has synchronised the source parameters; they are read as they are. A rank outside one of the pools
        passes an empty mapping for it.

        Args:
            src_params: This rank's source parameters by the names of its layout.
            dst_params: This rank's destination parameters, or the sink before them where the sync is `windowed`.
            changed: Logical tensors that may differ from those of the last transfer, the same on every rank; only they
                are sent. None: all. The first transfer, one after `forget`, and one after a failure send all.

        Raises:
            LayoutError: A parameter is missing, too small, or of another dtype than its layout says, or `changed` names
                an unknown tensor. Nothing was moved; the other ranks raise WeightSyncError.
            EngineError: The process behind this rank's sink is gone.
            WeightSyncError: The two sides do not hold the same weights afterwards (and the policy says so), or ranks
                disagree on what changed; on all ranks.
        """
        return NOTHING_MOVED if self._way is None else self._way.run(src_params, dst_params, changed)

    def compare(
        self, src_params: Mapping[str, Tensor], dst_params: Mapping[str, Tensor] | WindowSink
    ) -> tuple[Mismatch, ...] | None:
        """What the two sides hold otherwise, over all elements; nothing is moved. Collective over the group.

        None where the destination holds nothing that could be compared: before the first transfer, after `forget`, a
        failure or a release of memory; and on a rank of neither pool. Where something differs, the next transfer sends
        all. Arguments and errors as in `update_weights`.
        """
        return None if self._way is None else self._way.compare(src_params, dst_params)

    def forget(self) -> None:
        """The destination may have lost its weights (restart, release of memory): the next transfer sends all.

        Local; enough when one rank of the group calls it.
        """
        if self._way is not None:
            self._way.complete_next = True
