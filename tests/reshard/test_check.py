"""The proof must find what is wrong with a plan, and the bound must be the true one."""

import dataclasses

import numpy as np
import pytest

from rlhf.reshard.cells import Cells
from rlhf.reshard.check import Known, certify, check_arrivals, lower_bounds
from rlhf.reshard.layout import Box
from rlhf.reshard.plan import RankPlan, make_plan
from rlhf.reshard.topology import Topology
from tests.reshard.toy import Toy, brute_force_bound, engine, source

TOY = Toy(vocab=23, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=20, layers=2)
PLAN = make_plan(
    source(TOY, tp=2, stages=(2,), dp=1), engine(TOY, tp=1, dp=2, twice=True), Topology.blocks(2, ranks_per_node=2)
)


def broken(**lists) -> RankPlan:
    return dataclasses.replace(PLAN.of(1), **lists)


def test_sound_plan_passes():
    check_arrivals(PLAN, PLAN.of(0))
    check_arrivals(PLAN, PLAN.of(1))


@pytest.mark.parametrize("kind", ["copies", "receives", "echoes"])
def test_each_move_left_out_or_doubled_is_found(kind):
    moves = getattr(PLAN.of(1), kind)
    assert moves
    for at in range(len(moves)):
        with pytest.raises(AssertionError, match="once"):
            check_arrivals(PLAN, broken(**{kind: moves[:at] + moves[at + 1 :]}))
        with pytest.raises(AssertionError, match="once"):
            check_arrivals(PLAN, broken(**{kind: (*moves, moves[at])}))


def test_a_send_that_nobody_awaits_and_a_missing_one_are_found(monkeypatch):
    of, sends = PLAN.of, PLAN.of(0).sends
    for wrong in (sends[1:], (*sends, sends[0]), (dataclasses.replace(sends[0], dst_rank=0), *sends[1:])):
        parts = {0: dataclasses.replace(of(0), sends=wrong), 1: of(1)}
        monkeypatch.setattr(PLAN, "of", parts.__getitem__)
        with pytest.raises(AssertionError, match="do not pair"):
            certify(PLAN)
    monkeypatch.undo()
    assert certify(PLAN).ratio == 1.0


def test_move_from_a_rank_that_does_not_hold_the_block_is_found():
    moves = PLAN.of(1).receives
    with pytest.raises(AssertionError, match="does not hold"):
        check_arrivals(PLAN, broken(receives=(dataclasses.replace(moves[0], src_rank=1), *moves[1:])))


def test_what_is_known_of_a_rank_hides_no_fault_of_another_like_it():
    plan = make_plan(
        source(TOY, tp=1, stages=(1, 1), dp=1),
        engine(TOY, tp=1, dp=4, twice=True),
        Topology.blocks(4, ranks_per_node=4),
    )
    known, sound = Known(), plan.of(3)
    check_arrivals(plan, plan.of(2), known)
    assert [move.box for move in plan.of(2).receives] == [move.box for move in sound.receives]  # alike
    check_arrivals(plan, sound, known)
    for kind in ("receives", "echoes"):
        moves = getattr(sound, kind)
        for at in range(len(moves)):
            for wrong in (moves[:at] + moves[at + 1 :], (*moves, moves[at])):
                with pytest.raises(AssertionError, match="once"):
                    check_arrivals(plan, dataclasses.replace(sound, **{kind: wrong}), known)
    at = next(at for at, move in enumerate(sound.receives) if move.tensor.startswith("0."))  # of one stage
    other = dataclasses.replace(sound.receives[at], src_rank=1 - sound.receives[at].src_rank)
    with pytest.raises(AssertionError, match="does not hold"):
        check_arrivals(
            plan, dataclasses.replace(sound, receives=(*sound.receives[:at], other, *sound.receives[at + 1 :])), known
        )
    brute = brute_force_bound(plan.src, plan.dst)
    assert {rank: sum(lower_bounds(plan, rank, known).values()) for rank in range(4)} == brute


def test_bound_equals_brute_force():
    brute = brute_force_bound(PLAN.src, PLAN.dst)
    assert {rank: sum(lower_bounds(PLAN, rank).values()) for rank in (0, 1)} == brute


def test_a_plan_that_sends_what_its_taker_holds_is_sound_but_not_at_the_bound(monkeypatch):
    """Two replicas that each take their own weights from the other: the bound does not follow the planner."""
    plan = make_plan(
        source(TOY, tp=1, stages=(2,), dp=2), engine(TOY, tp=1, dp=2), Topology.blocks(2, ranks_per_node=1)
    )
    assert certify(plan).bound == certify(plan).moved == 0
    swapped = {}
    for rank, other in ((0, 1), (1, 0)):
        took = tuple(dataclasses.replace(move, src_rank=other) for move in plan.of(rank).copies)
        gave = tuple(dataclasses.replace(move, src_rank=rank) for move in plan.of(other).copies)
        swapped[rank] = dataclasses.replace(plan.of(rank), copies=(), receives=took, sends=gave)
    monkeypatch.setattr(plan, "of", swapped.__getitem__)
    certificate = certify(plan)
    assert certificate.moved > 0
    assert certificate.bound == certificate.far_bound == 0
    assert certificate.ratio == certificate.far_ratio == float("inf")


def test_cells_count_elements_exactly():
    rng = np.random.default_rng(5)
    for _ in range(50):
        starts = rng.integers(0, 9, size=(6, 2))
        boxes = [
            Box(tuple((int(a), int(a + n)) for a, n in zip(at, rng.integers(1, 7, 2), strict=True))) for at in starts
        ]
        dense = np.zeros((16, 16), dtype=int)
        for box in boxes:
            dense[box.slices] += 1
        cells = Cells(boxes)
        counted = cells.count(boxes)
        for times in range(1, 4):
            assert cells.elements(counted == times) == (dense == times).sum()


def test_what_is_left_of_a_box_is_disjoint_and_complete():
    rng = np.random.default_rng(7)
    for _ in range(200):
        a, b = (
            Box(
                tuple(
                    (int(at), int(at + n)) for at, n in zip(rng.integers(0, 6, 3), rng.integers(1, 5, 3), strict=True)
                )
            )
            for _ in range(2)
        )
        dense = np.zeros((12, 12, 12), dtype=int)
        for part in a.minus(b):
            dense[part.slices] += 1
        expected = np.zeros_like(dense)
        expected[a.slices] = 1
        expected[b.slices] = 0
        assert (dense == expected).all()
