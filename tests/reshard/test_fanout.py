"""Fanout inside a node: each element crosses into a node once, and its ranks pass it on."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.reshard.bucket import buckets_of, messages_of
from rlhf.reshard.check import certify, check_arrivals
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import Move, make_plan
from rlhf.reshard.topology import Fanout, Link, Topology
from tests.reshard.test_plan import layout_pairs
from tests.reshard.threads import run_plan
from tests.reshard.toy import (
    Toy,
    brute_force_bound,
    brute_force_far,
    empty_params,
    engine,
    filled_params,
    full_tensors,
    source,
)

TOY = Toy(vocab=23, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=24, layers=3)


def check_filled(src: ModelLayout, dst: ModelLayout, topology: Topology, *, fanout: Fanout, bucket_bytes: int) -> None:
    """Carry a plan out; every element arrived, and no byte more than brute force over elements allows passed a link."""
    plan = make_plan(src, dst, topology, fanout=fanout)
    certificate, full = certify(plan), full_tensors(src.tensors)
    src_params = {rank: filled_params(src, rank, full, padding=2) for rank in plan.ranks}
    dst_params = {rank: empty_params(dst, rank, fill=-7.0, padding=1) for rank in plan.ranks}
    traffic = run_plan(plan, src_params, dst_params, bucket_bytes=bucket_bytes)
    for rank in plan.ranks:
        wanted = empty_params(dst, rank, fill=-7.0, padding=1)
        for one in dst.holdings(rank) if rank in dst.ranks else ():
            wanted[one.param][one.param_box(one.box).slices] = full[one.tensor][one.box.slices]
        assert all(torch.equal(dst_params[rank][name], param) for name, param in wanted.items())
    far = 4 * brute_force_far(src, dst, topology.nodes, once=fanout is Fanout.NODE)
    near = 4 * sum(brute_force_bound(src, dst).values()) - far
    assert certificate.bound_by_link() == {Link.SAME_RANK: 0, Link.SAME_NODE: near, Link.ACROSS_NODES: far}
    for link, expected in ((Link.SAME_NODE, near), (Link.ACROSS_NODES, far)):
        assert sum(one.received[link] for one in traffic.values()) == expected
        assert sum(one.sent[link] for one in traffic.values()) == expected
        assert certificate.bytes_by_link()[link] == expected
    assert certificate.ratio == certificate.far_ratio == 1.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(layout_pairs(), st.sampled_from(list(Fanout)), st.sampled_from([24, 240, 4000, 1 << 20]))
def test_any_layouts_reach_the_bound_of_each_link(pair, fanout, bucket_bytes):
    check_filled(*pair, fanout=fanout, bucket_bytes=bucket_bytes)


@st.composite
def row_layouts(draw, first_rank: int, num_ranks: int, rows: int, *, whole: bool) -> ModelLayout:
    """Random blocks of rows of one matrix, overlapping in any way; together they hold it all."""
    cuts = sorted({0, rows, *draw(st.lists(st.integers(1, rows - 1), max_size=4))})
    held: dict[int, list[tuple[int, int]]] = {first_rank + at: [] for at in range(num_ranks)}
    for span in pairwise(cuts):  # each row somewhere
        held[draw(st.sampled_from(sorted(held)))].append(span)
    for spans in held.values():
        for _ in range(draw(st.integers(0, 2))):
            start = draw(st.integers(0, rows - 1))
            spans.append((start, draw(st.integers(start + 1, rows))))
    blocks = {
        rank: tuple(
            ParamLayout("w", Box.of(span, (0, 3)), f"p{at}" if whole else f"q{at}", (0, 0))
            for at, span in enumerate(dict.fromkeys(spans))
        )
        for rank, spans in held.items()
    }
    return ModelLayout({"w": (rows, 3)}, "float32", tuple(held), blocks.__getitem__)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(list(Fanout)), st.sampled_from([12, 60, 4000]))
def test_blocks_that_overlap_in_any_way_cross_once(data, fanout, bucket_bytes):
    rows, num_src, num_dst = (data.draw(st.integers(low, high)) for low, high in ((2, 12), (1, 3), (1, 5)))
    src = data.draw(row_layouts(0, num_src, rows, whole=True))
    dst = data.draw(row_layouts(data.draw(st.integers(0, num_src)), num_dst, rows, whole=False))
    nodes = tuple(data.draw(st.integers(0, 2)) for _ in range(1 + max(*src.ranks, *dst.ranks)))
    check_filled(src, dst, Topology(nodes), fanout=fanout, bucket_bytes=bucket_bytes)


def test_four_engines_of_a_node_take_each_element_across_once():
    """tp 2 trainer on node 0, four engines of tp 2 on node 1: a quarter of the direct traffic, shared by all ranks."""
    src, dst = source(TOY, tp=2, stages=(3,), dp=4), engine(TOY, tp=2, dp=4, first_rank=8)
    topology = Topology.blocks(16, ranks_per_node=8)
    direct, once = (certify(make_plan(src, dst, topology, fanout=fanout)) for fanout in Fanout)
    model = 4 * sum(torch.Size(shape).numel() for shape in TOY.tensors().values())
    replicated = 4 * 4 * TOY.hidden  # norms, which both ranks of an engine hold
    assert direct.far_bound == direct.bytes_by_link()[Link.ACROSS_NODES] == 4 * (model + replicated)
    assert once.far_bound == once.bytes_by_link()[Link.ACROSS_NODES] == model
    assert once.moved == direct.moved == once.bound
    for sides in (
        [one.received[Link.ACROSS_NODES] for one in once.ranks[8:]],
        [one.sent[Link.ACROSS_NODES] for one in once.ranks[:8]],
    ):
        assert max(sides) < 1.6 * model / 8
        assert min(sides) > 0.4 * model / 8


PLAN = make_plan(
    source(TOY, tp=2, stages=(1, 2), dp=1),
    engine(TOY, tp=2, dp=3, first_rank=3),
    Topology.blocks(10, ranks_per_node=4),
    fanout=Fanout.NODE,
)


@pytest.mark.parametrize("bucket_bytes", [8, 100, 1000, 1 << 20])
def test_what_is_passed_on_comes_after_what_brought_it_and_in_a_later_bucket(bucket_bytes):
    passed = 0
    keys = []
    for rank in PLAN.ranks:
        receives, sends = messages_of(PLAN, PLAN.of(rank), bucket_bytes)
        keys += [message.key for message in sends]
        brought = {(move.tensor, move.box): message.key for message in receives for move in message.moves}
        buckets = buckets_of(receives, sends, max(1, bucket_bytes // 4))
        arrived: dict[tuple[str, Box], int] = {}
        for number, one in enumerate(buckets):
            arrived |= {(move.tensor, move.box): number for message in one.receives for move in message.moves}
            for message in one.sends:
                for move in message.moves if message.passed_on else ():
                    passed += 1
                    assert brought[move.tensor, move.box] < message.key
                    assert arrived[move.tensor, move.box] <= one.after < number
    assert passed > 10
    assert len(set(keys)) == len(keys)  # a total order


def test_a_block_passed_on_by_a_rank_that_lacks_it_is_found():
    part = next(PLAN.of(rank) for rank in PLAN.ranks if any(move.passed_on for move in PLAN.of(rank).receives))
    check_arrivals(PLAN, part)
    at = next(at for at, move in enumerate(part.receives) if move.passed_on)
    for wrong in ({"src_rank": part.rank}, {"origin": part.receives[at].src_rank}):
        moves = list(part.receives)
        moves[at] = dataclasses.replace(moves[at], **wrong)
        with pytest.raises(AssertionError, match="lacks it"):
            check_arrivals(PLAN, dataclasses.replace(part, receives=tuple(moves)))
    assert isinstance(part.receives[at], Move)
