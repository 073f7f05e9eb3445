"""Transfers between four processes over gloo, against whole tensors that are assembled and sliced."""

import pytest

from rlhf.reshard.topology import Link, Topology
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table, several_pools
from tests.reshard.toy import Toy, engine, source

TOY = Toy(vocab=29, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=24, layers=3)

PAIRS = {
    "same ranks": (source(TOY, tp=2, stages=(1, 2), dp=1), engine(TOY, tp=4, dp=1)),
    "same ranks, two engines": (source(TOY, tp=4, stages=(3,), dp=1), engine(TOY, tp=2, dp=2)),
    "pools apart, an outsider": (source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=1, dp=1, first_rank=3)),
    "overlap": (source(TOY, tp=1, stages=(2, 1), dp=1), engine(TOY, tp=3, dp=1, first_rank=1)),
    "held twice": (source(TOY, tp=2, stages=(3,), dp=2), engine(TOY, tp=4, dp=1, twice=True)),
}


@pytest.mark.dist
def test_engine_parameters_equal_slices_of_the_assembled_model():
    run_ranks(4, several_pools, 4, {name: (as_table(src), as_table(dst)) for name, (src, dst) in PAIRS.items()})


def test_link_kinds_follow_the_hosts():
    topology = Topology.of_hosts(["a", "b", "a"])
    assert topology.link(0, 0) is Link.SAME_RANK
    assert topology.link(0, 2) is Link.SAME_NODE
    assert topology.link(0, 1) is Link.ACROSS_NODES
