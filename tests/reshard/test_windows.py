"""The stream of windows: what is cut, and in which order."""

from collections import Counter

import pytest
import torch

from rlhf.reshard.bucket import digests
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Fanout, Topology
from rlhf.reshard.windows import Windows
from tests.reshard.toy import Toy, elements, engine, source

TOY = Toy(vocab=37, hidden=24, heads=12, kv_heads=6, head_dim=4, ffn=30, layers=5)
SMALL = Toy(vocab=13, hidden=5, heads=12, kv_heads=6, head_dim=2, ffn=18, layers=5)
"""For windows of less than a row and of some rows, of which there are many."""


def pairs_of(toy: Toy) -> dict[str, tuple[ModelLayout, ModelLayout]]:
    return {
        "uneven stages, engines of 3 on the same ranks": (
            source(toy, tp=2, stages=(1, 4), dp=2),
            engine(toy, tp=3, dp=2, first_rank=1),
        ),
        "pools apart": (source(toy, tp=3, stages=(2, 2, 1), dp=1), engine(toy, tp=2, dp=2, first_rank=9)),
        "held twice": (source(toy, tp=1, stages=(5,), dp=1), engine(toy, tp=2, dp=1, twice=True)),
    }


PAIRS, SMALL_PAIRS = pairs_of(TOY), pairs_of(SMALL)


@pytest.mark.parametrize("window_bytes", [16, 100, 4096, 1 << 20])
@pytest.mark.parametrize("fanout", Fanout)
@pytest.mark.parametrize("name", PAIRS)
def test_windows_hold_each_wanted_element_once_and_both_ends_cut_alike(name, fanout, window_bytes):
    src, dst = (SMALL_PAIRS if window_bytes <= 100 else PAIRS)[name]
    plan = make_plan(src, dst, Topology.blocks(13, ranks_per_node=4), fanout=fanout)
    windows = Windows(plan, window_bytes)
    sent, received = {}, {}
    for rank in plan.ranks:
        ends = Windows(plan, window_bytes).messages(plan.of(rank))  # each rank on its own
        received |= digests(ends[0])
        sent |= digests(ends[1])
        assert [m.key for m in ends[0]] == sorted(m.key for m in ends[0])
    assert sent == received
    for rank in dst.ranks:
        seen: Counter[tuple[str, int]] = Counter()
        for at, window in enumerate(windows.of(rank)):
            assert window.number == at
            assert window.num_elements <= max(1, window_bytes // 4)
            filled = 0
            for piece in window.pieces:
                assert piece.at == filled  # packed without gaps
                filled += piece.move.box.num_elements
                seen.update(numbers_of(src, piece.move))
            assert filled == window.num_elements
        assert seen == Counter(elements(dst, rank))


def numbers_of(layout, move):
    """The elements of a move, one by one."""
    shape = layout.tensors[move.tensor]
    ids = torch.arange(torch.Size(shape).numel()).view(shape)[move.box.slices]
    return [(move.tensor, number) for number in ids.flatten().tolist()]


def test_what_is_passed_on_lies_in_windows_of_one_number_at_both_ranks():
    src, dst = PAIRS["pools apart"]
    plan = make_plan(src, dst, Topology.blocks(13, ranks_per_node=13 // 2), fanout=Fanout.NODE)
    apart = make_plan(src, dst, Topology((0,) * 9 + (1,) * 4), fanout=Fanout.NODE)
    for one in (plan, apart):
        windows = Windows(one, 4096)
        number = {
            (rank, piece.move.tensor, piece.move.box): window.number
            for rank in dst.ranks
            for window in windows.of(rank)
            for piece in window.pieces
        }
        passed = [
            piece.move
            for rank in dst.ranks
            for window in windows.of(rank)
            for piece in window.pieces
            if piece.move.passed_on
        ]
        assert passed
        for move in passed:
            assert number[move.src_rank, move.tensor, move.box] == number[move.dst_rank, move.tensor, move.box]


def test_every_source_of_a_rank_sends_into_its_first_window():
    src, dst = PAIRS["pools apart"]
    plan = make_plan(src, dst, Topology.blocks(13, ranks_per_node=4))
    wanted = sum(one.box.num_elements for one in dst.holdings(9))
    windows = Windows(plan, wanted // 3 * 4).of(9)  # 4 bytes an element
    assert len(windows) in (3, 4)  # not quite full
    everyone = {piece.move.src_rank for window in windows for piece in window.pieces}
    assert len({rank // 3 for rank in everyone}) == 3  # of all three stages
    assert {piece.move.src_rank for piece in windows[0].pieces} == everyone
