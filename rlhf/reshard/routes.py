"""One rank's way through a plan, ready to run: cut into buckets once for each set of tensors, then kept."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlhf.errors import LayoutError
from rlhf.reshard.bucket import Bucket, Message, buckets_of, messages_of
from rlhf.reshard.check import Known, far_bounds, lower_bounds
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import Plan, RankPlan, make_plan
from rlhf.reshard.staging import Staging
from rlhf.reshard.topology import Fanout, Topology
from rlhf.reshard.windows import NUM_REGIONS, Manifest, Windows

_Cut = tuple[tuple[Message, ...], tuple[Message, ...], tuple[Bucket, ...], Manifest | None]
"""(receives, sends, both as buckets, what the process with the parameters must know)."""


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of the transfer of some tensors."""

    part: RankPlan
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    buckets: tuple[Bucket, ...]
    bound: int
    """Bytes that this rank wants and does not hold."""
    far_bound: int
    """See `RankTraffic.far_bound`."""
    num_tensors: int
    """Logical tensors of the whole transfer."""
    item_bytes: int
    """Bytes of one element."""
    manifest: Manifest | None = None
    """What passes through windows to the process that holds this rank's destination parameters; None: none does."""

    @property
    def staging_bytes(self) -> int:
        """The most that two buffers can need, with the regions of windows."""
        return self.region_bytes + self.item_bytes * sum(
            max((self._staged(one) for one in self.buckets[at::2]), default=0) for at in (0, 1)
        )

    @property
    def region_bytes(self) -> int:
        """Bytes of all regions."""
        return 0 if self.manifest is None else NUM_REGIONS * self.manifest.region_elements * self.item_bytes

    def _staged(self, bucket: Bucket) -> int:
        """Elements at most; what a window receives lies in its region."""
        return bucket.num_elements if self.manifest is None else sum(one.num_elements for one in bucket.sends)


class Routes:
    """A plan and one rank's routes through it, with the buffers that they share."""

    def __init__(self, plan: Plan, rank: int, bucket_bytes: int, *, windowed: bool = False) -> None:
        self.plan, self._bucket_bytes, self.windowed = plan, bucket_bytes, windowed
        self.part = plan.of(rank)
        """This rank's part of a complete transfer."""
        self.staging = Staging(plan.src.dtype)
        known = Known()
        self._bounds: Mapping[str, int] = lower_bounds(plan, rank, known)
        self._far_bounds: Mapping[str, int] = far_bounds(plan, rank, known)
        self._cut: dict[frozenset[str] | None, Route] = {}

    def known(self, tensors: Collection[str]) -> frozenset[str]:
        """The given names as a set; raises LayoutError if one is of no tensor."""
        unknown = sorted(set(tensors) - self.plan.order.keys())
        if unknown:
            raise LayoutError(
                f"reshard: changed tensor {unknown[0]} is in neither layout; needs names of logical tensors, such as "
                f"{next(iter(self.plan.order))}"
            )
        return frozenset(tensors)

    def route(self, tensors: frozenset[str] | None = None) -> Route:
        """For the given tensors only; None: for all."""
        if tensors not in self._cut:
            self._cut[tensors] = self._make(tensors)
        return self._cut[tensors]

    def _make(self, tensors: frozenset[str] | None) -> Route:
        plan, item = self.plan, self.plan.src.item_bytes
        chosen = plan.order.keys() if tensors is None else tensors
        part = self.part if tensors is None else self.part.only(tensors)
        receives, sends, buckets, manifest = (self._windows if self.windowed else self._buckets)(part, tensors)
        return Route(
            part,
            receives,
            sends,
            buckets,
            sum(count for tensor, count in self._bounds.items() if tensor in chosen) * item,
            sum(count for tensor, count in self._far_bounds.items() if tensor in chosen) * item,
            len(chosen),
            item,
            manifest,
        )

    def _buckets(self, part: RankPlan, _: frozenset[str] | None) -> _Cut:
        receives, sends = messages_of(self.plan, part, self._bucket_bytes)
        most = max(1, self._bucket_bytes // self.plan.src.item_bytes)
        return receives, sends, buckets_of(receives, sends, most), None

    def _windows(self, part: RankPlan, tensors: frozenset[str] | None) -> _Cut:
        """Half a bucket a region, half for what is packed."""
        windows = Windows(self.plan, self._bucket_bytes // 2, tensors)
        receives, sends = windows.messages(part)
        manifest = None
        if part.rank in self.plan.dst.ranks:
            held = self.plan.dst.holdings(part.rank)
            manifest = Manifest(held, windows.of(part.rank), self.part.echoes, complete=tensors is None)
        return receives, sends, buckets_of(receives, sends, windows.max_elements, windowed=True), manifest


class RouteCache:
    """Routes by pair of layouts: several transfers between layouts that say the same share plan, proof and buffers.

    Not for transfers that run at the same time.
    """

    def __init__(self) -> None:
        self._found: dict[object, Routes] = {}

    @property
    def num_pairs(self) -> int:
        """Pairs of layouts seen, each with a topology, a fanout and a bucket size."""
        return len(self._found)

    def routes(
        self,
        src: ModelLayout,
        dst: ModelLayout,
        topology: Topology,
        fanout: Fanout,
        *,
        rank: int,
        bucket_bytes: int,
        windowed: bool = False,
    ) -> Routes:
        """Made when the pair is seen for the first time.

        Raises:
            LayoutError: See `make_plan`.
        """
        key = (fingerprint(src), fingerprint(dst), topology, fanout, rank, bucket_bytes, windowed)
        if key not in self._found:
            plan = make_plan(src, dst, topology, fanout=fanout)
            self._found[key] = Routes(plan, rank, bucket_bytes, windowed=windowed)
        return self._found[key]


def fingerprint(layout: ModelLayout) -> object:
    """Equal for layouts that say the same of the same ranks, whatever objects say it."""
    seen: dict[int, int] = {}
    kept: list[object] = []
    distinct: list[int] = []
    of_rank: list[int] = []
    for rank in layout.ranks:
        held = layout.holdings(rank)
        if id(held) not in seen:
            seen[id(held)] = len(kept)
            kept.append(held)  # an id stays taken while its tuple lives
            distinct.append(hash(held))
        of_rank.append(distinct[seen[id(held)]])
    return (tuple(layout.tensors.items()), layout.dtype, tuple(layout.ranks), tuple(of_rank))


def digest(tensors: frozenset[str] | None) -> int:
    """63 bits that differ for different sets of tensors."""
    names = "\n".join(sorted(tensors or ()))
    return int.from_bytes(hashlib.blake2b(names.encode(), digest_size=8).digest(), "little") >> 1
