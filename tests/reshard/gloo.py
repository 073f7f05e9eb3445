"""What the ranks of the multi-process tests do. Imports torch and nothing heavier, for eight processes pay for it."""

from collections.abc import Iterable, Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.errors import LayoutError, WeightSyncError
from rlhf.reshard.execute import execute
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.near import NearTransport, find_near_peers
from rlhf.reshard.topology import Fanout, Link, Topology
from rlhf.reshard.transport import GroupTransport, Parcel
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from tests.reshard.toy import brute_force_bound, brute_force_far, empty_params, filled_params, full_tensors

Pair = tuple[ModelLayout, ModelLayout]


def as_table(layout: ModelLayout) -> ModelLayout:
    """The same layout, as data that can be sent to another process."""
    table = {rank: layout.holdings(rank) for rank in layout.ranks}
    return ModelLayout(dict(layout.tensors), layout.dtype, layout.ranks, table.__getitem__)


def three_syncs(
    src: ModelLayout,
    dst: ModelLayout,
    topology: Topology,
    factory: GroupFactory,
    bucket: int,
    fanout: Fanout,
    *,
    near: bool,
) -> None:
    group = factory.cpu_group([tuple(sorted({*src.ranks, *dst.ranks}))])
    sync = WeightSync(src, dst, topology=topology, group=group, bucket_bytes=bucket, fanout=fanout, near=near)
    rank = dist.get_rank()
    assert (sync.certificate is None) == (group is None)
    if sync.certificate is not None:
        assert sync.certificate.bound == 4 * sum(brute_force_bound(src, dst).values())
        far = brute_force_far(src, dst, topology.nodes, once=fanout is Fanout.NODE)
        assert sync.certificate.far_bound == 4 * far
        assert sync.certificate.ratio == sync.certificate.far_ratio == 1.0
        assert 0 <= sync.certificate.staging_bytes <= 2 * bucket
        assert "ratio 1.000" in sync.certificate.render()
    for number in range(3):
        full = {name: tensor + 1000 * number for name, tensor in full_tensors(src.tensors).items()}
        params = filled_params(src, rank, full, padding=3)
        landed = empty_params(dst, rank, fill=-7.0, padding=1)
        stats = sync.update_weights(params, landed)
        expected = empty_params(dst, rank, fill=-7.0, padding=1)
        for one in dst.holdings(rank) if rank in dst.ranks else ():
            expected[one.param][one.param_box(one.box).slices] = full[one.tensor][one.box.slices]
        assert landed.keys() == expected.keys()
        for name in expected:
            assert torch.equal(landed[name], expected[name]), name
        if sync.certificate is not None:
            assert stats.moved == stats.bound == sync.certificate.bound
            assert dict(stats.received) == sync.certificate.bytes_by_link()
        else:
            assert stats.moved == 0


def several_pools(world: int, pairs: Mapping[str, Pair]) -> None:
    """Every pair of layouts, in small and in large buckets; then what must be refused."""
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for number, (src, dst) in enumerate(pairs.values()):
        topology = Topology.blocks(world, ranks_per_node=(2, 4, 8)[number % 3])
        for bucket in (200, 1 << 20):
            fanout = Fanout.NODE if bucket == 200 else Fanout.DIRECT
            three_syncs(src, dst, topology, factory, bucket, fanout, near=bool(number % 2))
    damage_shows(world, factory, pairs.values())
    refusals(world, factory, *next(iter(pairs.values())))
    ring(world, factory)


def damage_shows(world: int, factory: GroupFactory, pairs: Iterable[Pair]) -> None:
    """One element of one destination, changed before the checksums are taken, is named on every rank."""
    rank, topology = dist.get_rank(), Topology.blocks(world, ranks_per_node=2)
    for src, dst in pairs:
        group = factory.cpu_group([tuple(sorted({*src.ranks, *dst.ranks}))])
        params = filled_params(src, rank, full_tensors(src.tensors), padding=3)
        landed = empty_params(dst, rank, fill=-7.0, padding=1)
        victim = dst.ranks[-1]
        one = dst.holdings(victim)[-1]

        def execute_badly(*args: object, one=one, landed=landed, hurts=rank == victim, **kwargs: object) -> None:
            execute(*args, **kwargs)
            if hurts:
                landed[one.param][one.param_start] += 1.0

        sync = WeightSync(src, dst, topology=topology, group=group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlhf.reshard.way.execute", execute_badly)
            WeightSync(src, dst, topology=topology, group=group, verify=Verify.NONE).update_weights(params, landed)
            if group is not None:
                with pytest.raises(WeightSyncError, match=f"rank {victim} holds {one.tensor}\\["):
                    sync.update_weights(params, landed)
        sync.update_weights(params, landed)  # and all is well again


def ring(world: int, factory: GroupFactory) -> None:
    """Each rank sends parcels both ways: over gloo, fused as over NCCL, read from memory inside a node."""
    rank, topology = dist.get_rank(), Topology.blocks(world, ranks_per_node=2)
    group = factory.cpu_group([tuple(range(world))])

    def gather(numbers: list[int]) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(world)]
        dist.all_gather_object(rows, numbers, group=group)
        return rows

    before, after = (rank - 1) % world, (rank + 1) % world
    peers = find_near_peers(range(world), rank, topology, gather)
    assert set(peers.readable) == peers.readers == {before if rank % 2 else after}
    for kind in ("gloo", "fused", "near"):
        transport = plain = GroupTransport(group, topology)
        plain._batched = kind == "fused"
        if kind == "near":
            transport = NearTransport(plain, group, peers)
        landing = [(peer, size, torch.zeros(size)) for peer in (before, after) for size in (3, 5)]
        sends = (
            Parcel(peer, torch.full((size,), float(100 * rank + 10 * peer + size)))
            for peer in (before, after)
            for size in (3, 5)
        )
        transport.post([Parcel(peer, data) for peer, _, data in landing], sends).wait()
        for peer, size, data in landing:
            assert data.tolist() == [100.0 * peer + 10 * rank + size] * size
        traffic = transport.traffic
        for link in (Link.SAME_NODE, Link.ACROSS_NODES):
            assert traffic.received[link] == traffic.sent[link] == 4 * (3 + 5)


def refusals(world: int, factory: GroupFactory, src: ModelLayout, dst: ModelLayout) -> None:
    """`src` and `dst` cover all ranks."""
    topology = Topology.blocks(world, ranks_per_node=2)
    everyone = factory.cpu_group([tuple(range(world))])
    with pytest.raises(WeightSyncError, match="planned different messages"):
        WeightSync(src, dst, topology=topology, group=everyone, bucket_bytes=64 if dist.get_rank() else 1 << 20)
    name = next(iter(dst.tensors))
    bad = ModelLayout({**dst.tensors, name: (3, 7)}, dst.dtype, dst.ranks, dst.holdings)
    with pytest.raises(LayoutError, match=f"{name} has shape"):
        WeightSync(src, bad, topology=topology, group=everyone)
    with pytest.raises(WeightSyncError, match="group is WORLD"):
        WeightSync(src, dst, topology=topology, group=dist.group.WORLD)
    few = factory.cpu_group([(0, 1), tuple(range(2, world))])
    with pytest.raises(WeightSyncError, match="needs the ranks of both pools"):
        WeightSync(src, dst, topology=topology, group=few)
