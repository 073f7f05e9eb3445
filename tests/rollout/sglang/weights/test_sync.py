"""A weight sync over gloo into another process's parameters, without SGLang: each scheduler is a thread of its rank."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineLostError, LayoutError, WeightSyncError
from rlhf.families.spec import ModelSpec
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Fanout, Link, Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.sglang.layout import Sizes, padding_elements, sglang_layout
from rlhf.rollout.sglang.weights import loader
from rlhf.rollout.sglang.weights.lasting import LastingSink
from rlhf.rollout.sglang.weights.sink import SchedulerSink
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.reshard.toy import brute_force_bound, brute_force_far, filled_params, full_tensors
from tests.rollout.schedulers import ThreadPort, model_of
from tests.rollout.sglang.test_layout import SPECS
from tests.rollout.sglang.weights.test_loader import check_holds, staged

pytestmark = pytest.mark.dist
SIZES = Sizes(2, 2)
BUCKET = 20000


POOLS = (  # engines, first rank, ranks of a node, fanout
    (2, 0, 4, Fanout.DIRECT),
    (1, 4, 4, Fanout.DIRECT),
    (2, 2, (0, 0, 1, 1, 1, 1), Fanout.NODE),  # the first stage crosses once for two engines
)


def test_actor_of_four_ranks_into_engines_on_its_own_ranks_in_a_pool_apart_and_two_on_a_node():
    spec = SPECS["qwen3_moe"]
    src = as_table(staged(spec))
    layouts = [
        as_table(sglang_layout(spec, tp=2, ep=2, dp=dp, first_rank=first, dtype="float32")) for dp, first, *_ in POOLS
    ]
    run_ranks(6, into_engines, spec, src, layouts)


def into_engines(spec: ModelSpec, src: ModelLayout, layouts: list[ModelLayout]) -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for dst, (_, _, nodes, fanout) in zip(layouts, POOLS, strict=True):
        topology = Topology(nodes) if isinstance(nodes, tuple) else Topology.blocks(6, ranks_per_node=nodes)
        group = factory.cpu_group([tuple(sorted({*src.ranks, *dst.ranks}))])
        for near in (True, False) if fanout is Fanout.NODE else (True,):
            sync = WeightSync(
                src, dst, topology=topology, group=group, bucket_bytes=BUCKET, windowed=True, fanout=fanout, near=near
            )
            far = 4 * brute_force_far(src, dst, topology.nodes, once=fanout is Fanout.NODE)
            syncs(spec, src, dst, sync, far)
        if group is not None:
            refusals(spec, src, dst, sync)
            losses(spec, src, dst, sync)


def sink_of(spec: ModelSpec, dst: ModelLayout, model: torch.nn.Module) -> SchedulerSink:
    tp_rank = (dist.get_rank() - dst.ranks[0]) % 2
    port = ThreadPort(model)
    return SchedulerSink(
        spec, SIZES, tp_rank=tp_rank, dtype="float32", port=port, cpu_group=None, device=torch.device("cpu")
    )


def syncs(spec: ModelSpec, src: ModelLayout, dst: ModelLayout, sync: WeightSync, far: int) -> None:
    """A complete sync, one of what changed, one after the engine lost its weights: bytes, memory and every element."""
    rank = dist.get_rank()
    model = model_of(spec, SIZES)
    into = sink_of(spec, dst, model) if rank in dst.ranks else {}
    full = full_tensors(src.tensors)
    changed = [tensor for tensor in src.tensors if ".experts.3." in tensor]
    everything = 4 * sum(brute_force_bound(src, dst).values())
    for number, named in enumerate((None, changed, changed)):
        for tensor in changed:
            full[tensor] = full[tensor] + 1
        if number == 2 and rank == dst.ranks[-1]:
            into.forget()
            for param in model.parameters():
                param.fill_(torch.nan)
        stats = sync.update_weights(filled_params(src, rank, full), into, changed=named)
        if sync.certificate is None:
            assert stats.moved == 0
            continue
        assert stats.moved == stats.bound
        assert (stats.moved == everything) == (number != 1)
        assert stats.received[Link.ACROSS_NODES] == stats.far_bound
        assert stats.far_bound == far or number == 1
        assert 0 < stats.staged_bytes <= stats.staging_bytes <= sync.certificate.staging_bytes <= 2 * BUCKET
        if rank in dst.ranks:
            padding = sum(padding_elements(spec, SIZES, (rank - dst.ranks[0]) % 2).values())
            check_holds(model, dst.holdings(rank), full, padding)


def refusals(spec: ModelSpec, src: ModelLayout, dst: ModelLayout, sync: WeightSync) -> None:
    """What one engine refuses, and one element that is changed in one engine, raise on all ranks."""
    rank, victim = dist.get_rank(), dst.ranks[-1]
    model = model_of(spec, SIZES)
    full = full_tensors(src.tensors)
    params = filled_params(src, rank, full)
    into = sink_of(spec, dst, model) if rank in dst.ranks else {}
    norm = model.model.norm
    if rank == victim:
        model.model.norm = torch.nn.LayerNorm(44, bias=False, dtype=torch.bfloat16)
    named = "bfloat16; float32 arrives" if rank == victim else f"engine of rank {victim} refuses what would come"
    with pytest.raises(WeightSyncError, match=named):
        sync.update_weights(params, into)
    if rank == victim:
        model.model.norm = norm
        model.post_load_weights = lambda: norm.weight.view(torch.int32)[7].bitwise_xor_(1)
    with pytest.raises(WeightSyncError, match=rf"rank {victim} .*model\.norm\.weight"):
        sync.update_weights(params, into)
    if rank == victim:
        del model.post_load_weights
    sync.update_weights(params, into)
    if rank in dst.ranks:
        padding = sum(padding_elements(spec, SIZES, (rank - dst.ranks[0]) % 2).values())
        check_holds(model, dst.holdings(rank), full, padding)
    with pytest.raises((LayoutError, WeightSyncError), match=r"needs a WindowSink|refuses its parameters"):
        sync.update_weights(params, {})


def losses(spec: ModelSpec, src: ModelLayout, dst: ModelLayout, sync: WeightSync) -> None:
    """An engine that is lost in the middle of a sync: nobody waits for it, all raise; a new one gets everything."""
    rank, victim = dist.get_rank(), dst.ranks[-1]
    model = model_of(spec, SIZES)
    full = full_tensors(src.tensors)
    params = filled_params(src, rank, full)
    into = LastingSink(sink_of(spec, dst, model)) if rank in dst.ranks else {}
    sync.update_weights(params, into)
    load = loader._Transfer.load

    def die(self: loader._Transfer, number: int, regions: Sequence[torch.Tensor]) -> None:
        if number == 1:
            model.rlhf_loading._channel.close()
        load(self, number, regions)

    if rank == victim:
        loader._Transfer.load = die
    with pytest.raises(WeightSyncError, match=rf"engine of rank {victim} was lost"):
        sync.update_weights(params, into)
    loader._Transfer.load = load
    with pytest.raises(WeightSyncError, match=rf"engine of rank {victim} was lost"):  # it is not asked again
        sync.update_weights(params, into)
    if rank == victim:
        assert into.is_lost
        assert isinstance(into.cause, EngineLostError)
        model = model_of(spec, SIZES)
        into = LastingSink(sink_of(spec, dst, model))
    stats = sync.update_weights(params, into, changed=())
    assert stats.moved == stats.bound
    if rank in dst.ranks:
        assert not into.is_lost
        padding = sum(padding_elements(spec, SIZES, (rank - dst.ranks[0]) % 2).values())
        check_holds(model, dst.holdings(rank), full, padding)
