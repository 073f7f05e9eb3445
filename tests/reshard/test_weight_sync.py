"""Transfers between real processes over gloo, against whole tensors that are assembled and sliced."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.errors import LayoutError, WeightSyncError
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Link, Topology
from rlhf.reshard.transport import GroupTransport, Parcel
from rlhf.reshard.weight_sync import WeightSync
from tests.harness.ranks import run_ranks
from tests.reshard.toy import Toy, brute_force_bound, empty_params, engine, filled_params, full_tensors, source

TOY = Toy(vocab=29, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=24, layers=3)


def cases(world: int) -> dict[str, tuple[ModelLayout, ModelLayout]]:
    if world == 4:
        return {
            "same ranks": (source(TOY, tp=2, stages=(1, 2), dp=1), engine(TOY, tp=4, dp=1)),
            "same ranks, two engines": (source(TOY, tp=4, stages=(3,), dp=1), engine(TOY, tp=2, dp=2)),
            "pools apart, an outsider": (source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=1, dp=1, first_rank=3)),
            "overlap": (source(TOY, tp=1, stages=(2, 1), dp=1), engine(TOY, tp=3, dp=1, first_rank=1)),
        }
    return {
        "same ranks": (source(TOY, tp=4, stages=(2, 1), dp=1), engine(TOY, tp=2, dp=4)),
        "kv heads replicated": (source(TOY, tp=2, stages=(1, 0, 2), dp=1), engine(TOY, tp=8, dp=1)),
        "data parallel": (source(TOY, tp=2, stages=(1, 2), dp=2), engine(TOY, tp=4, dp=2, twice=True)),
        "pools apart": (source(TOY, tp=1, stages=(1, 1, 1), dp=1), engine(TOY, tp=4, dp=1, first_rank=4)),
        "overlap": (source(TOY, tp=4, stages=(3,), dp=1), engine(TOY, tp=2, dp=3, first_rank=2)),
    }


def three_syncs(src: ModelLayout, dst: ModelLayout, topology: Topology, factory: GroupFactory, bucket: int) -> None:
    group = factory.cpu_group([tuple(sorted({*src.ranks, *dst.ranks}))])
    sync = WeightSync(src, dst, topology=topology, group=group, bucket_bytes=bucket)
    rank = dist.get_rank()
    assert (sync.certificate is None) == (group is None)
    if sync.certificate is not None:
        assert sync.certificate.bound == 4 * sum(brute_force_bound(src, dst).values())
        assert sync.certificate.ratio == 1.0
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


def several_pools(world: int) -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for number, (src, dst) in enumerate(cases(world).values()):
        topology = Topology.blocks(world, ranks_per_node=(2, 4, 8)[number % 3])
        for bucket in (64, 1 << 20):
            three_syncs(src, dst, topology, factory, bucket)
    refusals(world, factory)
    ring(world, factory)


def ring(world: int, factory: GroupFactory) -> None:
    """Each rank sends two parcels to the next; one by one as over gloo, and fused as over NCCL."""
    rank, topology = dist.get_rank(), Topology.blocks(world, ranks_per_node=2)
    for fused in (False, True):
        transport = GroupTransport(factory.cpu_group([tuple(range(world))]), topology)
        transport._batched = fused
        landing = [torch.zeros(3), torch.zeros(5)]
        before, after = (rank - 1) % world, (rank + 1) % world
        sends = (Parcel(after, torch.full((size,), float(10 * rank + size))) for size in (3, 5))
        transport.post([Parcel(before, data) for data in landing], sends).wait()
        assert [data.tolist() for data in landing] == [[10.0 * before + size] * size for size in (3, 5)]
        near, far = (Link.SAME_NODE, Link.ACROSS_NODES) if rank % 2 else (Link.ACROSS_NODES, Link.SAME_NODE)
        assert transport.traffic.received[near] == transport.traffic.sent[far] == 4 * (3 + 5)
        assert transport.traffic.received[far] == transport.traffic.sent[near] == 0


def refusals(world: int, factory: GroupFactory) -> None:
    src, dst = cases(world)["same ranks"]
    topology = Topology.blocks(world, ranks_per_node=2)
    everyone = factory.cpu_group([tuple(range(world))])
    with pytest.raises(WeightSyncError, match="planned different messages"):
        WeightSync(src, dst, topology=topology, group=everyone, bucket_bytes=64 if dist.get_rank() else 1 << 20)
    bad = ModelLayout({**dst.tensors, "embed": (30, 6)}, dst.dtype, dst.ranks, dst.holdings)
    with pytest.raises(LayoutError, match="embed has shape"):
        WeightSync(src, bad, topology=topology, group=everyone)
    few = factory.cpu_group([(0, 1), tuple(range(2, world))])
    with pytest.raises(WeightSyncError, match="needs the ranks of both pools"):
        WeightSync(src, dst, topology=topology, group=few)


@pytest.mark.dist
@pytest.mark.parametrize("world", [4, 8])
def test_engine_parameters_equal_slices_of_the_assembled_model(world):
    run_ranks(world, several_pools, world)


def test_link_kinds_follow_the_hosts():
    topology = Topology.of_hosts(["a", "b", "a"])
    assert topology.link(0, 0) is Link.SAME_RANK
    assert topology.link(0, 2) is Link.SAME_NODE
    assert topology.link(0, 1) is Link.ACROSS_NODES
