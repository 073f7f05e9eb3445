"""Random admissible layouts: what arrives, how often, and in how many bytes, against brute force over elements."""

from math import gcd, lcm

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.errors import LayoutError
from rlhf.reshard.check import certify
from rlhf.reshard.execute import LocalParams
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Link, Topology
from tests.reshard.threads import run_plan
from tests.reshard.toy import (
    Toy,
    assembled,
    brute_force_bound,
    empty_params,
    engine,
    filled_params,
    full_tensors,
    source,
)


@st.composite
def layout_pairs(draw):
    """(source, destination, topology): pools that coincide, overlap or are apart."""
    tp, tp2 = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dp = draw(st.integers(1, 2 if tp > 4 else 3))
    stages = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3).filter(sum)))
    # Admissible: tp divides KV heads; engine ranks divide KV heads, or KV heads divide them.
    kv_heads = tp if tp2 % tp == 0 else lcm(tp, tp2)
    heads = kv_heads * draw(st.integers(1, 2)) * (tp2 // gcd(tp2, kv_heads))
    toy = Toy(
        vocab=draw(st.integers(max(tp, tp2), 29)),
        hidden=draw(st.sampled_from([3, 5, 6])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2,
        ffn=lcm(tp, tp2) * draw(st.integers(1, 2)),
        layers=sum(stages),
    )
    src_size = tp * len(stages) * dp
    first = draw(st.sampled_from([0, 0, src_size // 2, src_size]))
    engines = draw(st.integers(1, 2))
    src = source(toy, tp=tp, stages=stages, dp=dp)
    dst = engine(toy, tp=tp2, dp=engines, first_rank=first, twice=draw(st.booleans()))
    world = max(src_size, first + tp2 * engines)
    return src, dst, Topology.blocks(world, ranks_per_node=draw(st.sampled_from([1, 3, 8, 100])))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(layout_pairs(), st.sampled_from([4, 40, 4000, 1 << 20]))
def test_each_wanted_element_arrives_once_in_the_fewest_bytes(pair, bucket_bytes):
    src, dst, topology = pair
    plan = make_plan(src, dst, topology)
    certificate = certify(plan)
    full = full_tensors(src.tensors)
    src_params = {rank: filled_params(src, rank, full, padding=2) for rank in plan.ranks}
    dst_params = {rank: empty_params(dst, rank, fill=-7.0, padding=1) for rank in plan.ranks}
    traffic = run_plan(plan, src_params, dst_params, bucket_bytes=bucket_bytes)

    reference = assembled(src, src_params)
    for rank in plan.ranks:
        wanted = empty_params(dst, rank, fill=-7.0, padding=1)
        for one in dst.holdings(rank) if rank in dst.ranks else ():
            wanted[one.param][one.param_box(one.box).slices] = reference[one.tensor][one.box.slices]
        for name, param in wanted.items():  # padding included: nothing else was written
            assert torch.equal(dst_params[rank][name], param)

    bound = brute_force_bound(src, dst)
    for one in certificate.ranks:
        counted = traffic[one.rank]
        assert sum(counted.received.values()) == 4 * bound.get(one.rank, 0) == one.bound == one.moved
        assert counted.sent == one.sent
        assert {link: counted.received[link] for link in Link if link is not Link.SAME_RANK} == {
            link: one.received[link] for link in Link if link is not Link.SAME_RANK
        }
    assert certificate.ratio == 1.0


TOY = Toy(vocab=23, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=20, layers=3)


def test_nearest_holder_sends():
    """tp 2, dp 4 on two nodes of 4; engines of tp 1 on ranks 0..7: the other half is always on the own node."""
    src = source(TOY, tp=2, stages=(3,), dp=4)
    dst = engine(TOY, tp=1, dp=8)
    certificate = certify(make_plan(src, dst, Topology.blocks(8, ranks_per_node=4)))
    assert certificate.bytes_by_link()[Link.ACROSS_NODES] == 0
    assert certificate.bytes_by_link()[Link.SAME_NODE] == certificate.bound > 0
    far = certify(make_plan(src, engine(TOY, tp=1, dp=8, first_rank=8), Topology.blocks(16, ranks_per_node=4)))
    assert (
        far.bytes_by_link()[Link.ACROSS_NODES]
        == far.bound
        == 8 * 4 * sum(torch.Size(shape).numel() for shape in TOY.tensors().values())
    )


def test_replicas_share_the_sending():
    """6 engines take from 4 replicas: each block goes out once or twice from every replica."""
    src = source(TOY, tp=2, stages=(3,), dp=4)
    certificate = certify(make_plan(src, engine(TOY, tp=1, dp=6, first_rank=8), Topology.blocks(14, ranks_per_node=1)))
    sent = {one.rank: one.sent[Link.ACROSS_NODES] for one in certificate.ranks if one.rank < 8}
    mean = sum(sent.values()) / 8
    assert max(sent.values()) < 1.25 * mean
    assert min(sent.values()) > 0.75 * mean


def test_same_layout_moves_nothing():
    dst = engine(TOY, tp=2, dp=2)
    plan = make_plan(dst, dst, Topology.blocks(4, ranks_per_node=4))
    certificate = certify(plan)
    assert (certificate.moved, certificate.bound, certificate.ratio) == (0, 0, 1.0)
    assert all(not plan.of(rank).sends and plan.of(rank).copies for rank in range(4))


def test_blocks_that_overlap_in_part_are_cut_not_sent_twice():
    """Rank 0 holds rows 0..5, rank 1 rows 3..7: rank 2 wants all 8."""
    rows = {0: (0, 6), 1: (3, 8)}
    src = ModelLayout(
        {"w": (8, 3)}, "float32", (0, 1), lambda rank: (ParamLayout("w", Box.of(rows[rank], (0, 3)), "p", (0, 0)),)
    )
    dst = ModelLayout(
        {"w": (8, 3)}, "float32", (2,), lambda _: (ParamLayout("w", Box.of((0, 8), (0, 3)), "p", (0, 0)),)
    )
    certificate = certify(make_plan(src, dst, Topology.blocks(3, ranks_per_node=3)))
    assert certificate.moved == 8 * 3 * 4


@pytest.mark.parametrize("wanter", [0, 1, 2])
def test_what_two_holders_share_in_part_comes_from_the_nearer(wanter):
    """Rows 3..5 are on ranks 0 and 1, neither of which holds all; rank 2 is a neighbour of rank 1."""
    rows = {0: (0, 6), 1: (3, 8)}
    src = ModelLayout(
        {"w": (8, 3)}, "float32", (0, 1), lambda rank: (ParamLayout("w", Box.of(rows[rank], (0, 3)), "p", (0, 0)),)
    )
    dst = ModelLayout(
        {"w": (8, 3)}, "float32", (wanter,), lambda _: (ParamLayout("w", Box.of((0, 8), (0, 3)), "p", (0, 0)),)
    )
    certificate = certify(make_plan(src, dst, Topology((0, 1, 1))))
    from_nearer, near = {0: (6, Link.SAME_RANK), 1: (5, Link.SAME_RANK), 2: (5, Link.SAME_NODE)}[wanter]
    received = certificate.bytes_by_link()
    assert received[near] == from_nearer * 3 * 4
    assert received[Link.ACROSS_NODES] == (8 - from_nearer) * 3 * 4


def changed(layout: ModelLayout, **fields) -> ModelLayout:
    given = {"tensors": layout.tensors, "dtype": layout.dtype, "ranks": layout.ranks, "holdings": layout.holdings}
    return ModelLayout(**{**given, **fields})


def without(layout: ModelLayout, tensor: str) -> dict:
    return {name: shape for name, shape in layout.tensors.items() if name != tensor}


@pytest.mark.parametrize(
    ("change_src", "change_dst", "named"),
    [
        (
            lambda s: {"tensors": without(s, "1.gate")},
            lambda d: {},
            r"1\.gate is wanted at the destination but unknown at the source",
        ),
        (lambda s: {}, lambda d: {"tensors": without(d, "1.gate")}, r"1\.gate is held at the source but unknown"),
        (lambda s: {}, lambda d: {"tensors": {**d.tensors, "lost": (3,)}}, "lost is wanted at the destination"),
        (lambda s: {}, lambda d: {"tensors": {**d.tensors, "0.q": (15, 6)}}, r"0\.q has shape \(16, 6\).*\(15, 6\)"),
        (lambda s: {"dtype": "bfloat16"}, lambda d: {}, "dtype bfloat16 at the source, float32"),
        (
            lambda s: {"holdings": lambda r: tuple(one for one in s.holdings(r) if one.tensor != "2.o" or r != 1)},
            lambda d: {},
            r"no source rank holds 2\.o at \(\(0, 6\), \(8, 16\)\)",
        ),
        (
            lambda s: {},
            lambda d: {"holdings": lambda r: tuple(one for one in d.holdings(r) if one.tensor != "final_norm")},
            "no destination rank holds final_norm",
        ),
        (
            lambda s: {},
            lambda d: {"holdings": lambda r: (*d.holdings(r), ParamLayout("0.norm", Box.of((0, 7)), "0.norm", (0,)))},
            r"destination rank 2, parameter 0\.norm: box \(\(0, 7\),\)",
        ),
        (
            lambda s: {"holdings": lambda r: (*s.holdings(r), ParamLayout("0.norm", Box.of((3, 3)), "n", (0,)))},
            lambda d: {},
            r"source rank 0, parameter n: box \(\(3, 3\),\)",
        ),
        (
            lambda s: {},
            lambda d: {"holdings": lambda r: (*d.holdings(r), ParamLayout("0.norm", Box.of((0, 2)), "n", (-1,)))},
            r"destination rank 2, parameter n: box \(\(0, 2\),\) at \(-1,\)",
        ),
        (
            lambda s: {"holdings": lambda r: (*s.holdings(r), ParamLayout("ghost", Box.of((0, 7)), "g", (0,)))},
            lambda d: {},
            "source rank 0, parameter g: holds ghost",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(change_src, change_dst, named):
    src, dst = source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=4, dp=1, first_rank=2)
    with pytest.raises(LayoutError, match=named):
        make_plan(
            changed(src, **change_src(src)), changed(dst, **change_dst(dst)), Topology.blocks(6, ranks_per_node=6)
        )


def test_rank_without_a_node_is_refused():
    src = source(TOY, tp=2, stages=(3,), dp=1)
    with pytest.raises(LayoutError, match="rank 5 has no node"):
        make_plan(src, engine(TOY, tp=4, dp=1, first_rank=2), Topology.blocks(4, ranks_per_node=4))


@pytest.mark.parametrize(
    ("break_params", "named"),
    [
        (lambda p: p.pop("0.qkv"), r"source rank 1: no parameter 0\.qkv, which should hold 0\.q"),
        (lambda p: p.update({"0.o": p["0.o"][:, :-1]}), r"source rank 1: 0\.o has shape \(6, 7\)"),
        (lambda p: p.update({"0.o": p["0.o"].double()}), r"0\.o is torch\.float64, its layout says float32"),
    ],
)
def test_parameters_that_belie_their_layout_are_refused(break_params, named):
    src, dst = source(TOY, tp=2, stages=(3,), dp=1), engine(TOY, tp=1, dp=2)
    plan = make_plan(src, dst, Topology.blocks(2, ranks_per_node=2))
    full = full_tensors(src.tensors)
    LocalParams(plan.src_index, 0, filled_params(src, 0, full), side="source")
    src_params = filled_params(src, 1, full)
    break_params(src_params)
    with pytest.raises(LayoutError, match=named):
        LocalParams(plan.src_index, 1, src_params, side="source")
