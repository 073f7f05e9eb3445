"""What two sides of a standing transfer hold, compared without moving anything."""

from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.reshard.toy import Toy, empty_params, engine, filled_params, full_tensors, source

TOY = Toy(vocab=29, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=24, layers=2)


def compares(src: ModelLayout, dst: ModelLayout) -> None:
    group = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)).cpu_group([src.ranks])
    sync = WeightSync(src, dst, topology=Topology.blocks(2, ranks_per_node=2), group=group, verify=Verify.NONE)
    rank, full = dist.get_rank(), full_tensors(src.tensors)
    given, held = filled_params(src, rank, full), empty_params(dst, rank, fill=0.0)
    assert sync.num_tensors == len(src.tensors)
    assert sync.compare(given, held) is None  # nothing was sent yet
    sync.update_weights(given, held)
    kept = {name: param.clone() for name, param in held.items()}
    assert sync.compare(given, held) == ()

    one = next(one for one in dst.holdings(1) if one.tensor.endswith(".down"))
    place = one.param_box(one.box).slices
    if rank == 1:
        held[one.param][place][1, 2] += 1.0
    found = sync.compare(given, held)
    assert found is not None
    assert [(mismatch.rank, mismatch.tensor, mismatch.box.num_elements) for mismatch in found] == [(1, one.tensor, 1)]
    assert _differ(held, kept) == ({one.param} if rank == 1 else set())  # it was not mended by looking

    stats = sync.update_weights(given, held, changed=())  # all comes, although nothing has changed
    assert stats.num_tensors == len(src.tensors)
    assert not _differ(held, kept)
    assert sync.compare(given, held) == ()
    if rank == 0:
        sync.forget()
    assert sync.compare(given, held) is None


def _differ(held: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, param in held.items() if not torch.equal(param, kept[name])}


@pytest.mark.dist
def test_a_comparison_names_the_element_moves_nothing_and_lets_the_next_sync_send_all():
    run_ranks(2, compares, as_table(source(TOY, tp=2, stages=(2,), dp=1)), as_table(engine(TOY, tp=2, dp=1)))


def test_a_rank_of_neither_pool_compares_nothing():
    src, dst = source(TOY, tp=1, stages=(2,), dp=1), engine(TOY, tp=1, dp=1)
    sync = WeightSync(src, dst, topology=Topology.blocks(2, ranks_per_node=2), group=None)
    assert sync.compare({}, {}) is None
    assert sync.num_tensors == 0
