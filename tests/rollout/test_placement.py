"""Ranks of the engines: the config's list and the layouts' grid are one, and a stride saves bytes."""

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import RolloutConfig
from rlhf.errors import ConfigError, LayoutError
from rlhf.families.published import find_published
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.check import certify
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.placement import engine_grid
from rlhf.rollout.sglang.layout import sglang_layout
from rlhf.trainers.ownership import Ownership


def test_a_stride_puts_engines_side_by_side() -> None:
    assert RolloutConfig(tp=2, dp=2, first_rank=4).engines == ((4, 5), (6, 7))
    assert RolloutConfig(tp=2, dp=2, first_rank=4, stride=2).engines == ((4, 6), (5, 7))
    assert RolloutConfig(tp=2, dp=4, stride=2).engines == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert Ownership.of(RolloutConfig(tp=2, dp=4, stride=2)).leaders == (0, 1, 4, 5)


@pytest.mark.parametrize(("tp", "dp", "stride"), [(1, 4, 1), (2, 4, 1), (2, 4, 2), (3, 6, 3), (2, 6, 3), (4, 1, 1)])
def test_the_layouts_know_the_tp_rank_of_every_rank(tp: int, dp: int, stride: int) -> None:
    config = RolloutConfig(tp=tp, dp=dp, first_rank=2, stride=stride)
    grid = engine_grid(tp=tp, dp=dp, first_rank=2, stride=stride)
    assert sorted(config.engines) == sorted(grid.groups("tp"))
    assert all(grid.coords(rank)["tp"] == at for ranks in config.engines for at, rank in enumerate(ranks))


def test_an_odd_stride_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.stride: 2 given, but rollout\.dp = 3"):
        RolloutConfig(tp=2, dp=3, stride=2)
    with pytest.raises(LayoutError, match=r"rollout\.stride"):
        engine_grid(tp=2, dp=3, first_rank=0, stride=2)


@pytest.mark.parametrize("layout_of", [native_layout, sglang_layout])
def test_with_the_stride_of_micro_dp_groups_a_rank_keeps_its_own_shard(layout_of) -> None:
    published = find_published("qwen3-8b")
    assert published is not None
    spec = published.spec
    src = megatron_layout(spec, ParallelConfig(tp=4), head=Head.LM, dtype="float32")
    moved = []
    for stride in (1, 2):
        dst = layout_of(spec, tp=2, dp=2, first_rank=0, stride=stride, dtype="float32")
        certificate = certify(make_plan(src, dst, Topology.blocks(4, ranks_per_node=4)))
        assert certificate.ratio == 1.0
        moved.append(certificate.moved)
    # Cut tensors: M/4 for each of 4 ranks, where neighbours need M/4, M/2, M/2, M/4.
    assert moved[1] == pytest.approx(moved[0] * 2 / 3, rel=0.1)
