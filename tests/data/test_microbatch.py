"""Microbatch plans: what holds for any lengths, and that ranks agree on the count."""

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.microbatch import plan_microbatches
from rlhf.errors import ConfigError, ShapeError
from tests.harness.ranks import run_ranks

rows = st.lists(st.integers(1, 40), max_size=30)


@settings(deadline=None)
@given(rows, st.integers(1, 60), st.integers(1, 4))
def test_every_row_once_within_the_budget_and_a_multiple(lengths, budget, multiple_of):
    plan = plan_microbatches(lengths, budget, None, multiple_of)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert len(plan) >= 1
    assert len(plan) % multiple_of == 0
    for part in plan:
        assert len(part) <= 1 or sum(lengths[row] for row in part) <= budget
        assert list(part) == sorted(part)
    assert plan == plan_microbatches(tuple(lengths), budget, None, multiple_of)


@settings(deadline=None)
@given(rows, st.integers(1, 60))
def test_the_count_is_near_the_fewest_possible(lengths, budget):
    fewest = max(1, -(-sum(min(length, budget) for length in lengths) // budget))
    assert len(plan_microbatches(lengths, budget, None)) <= 2 * fewest  # no two half-empty ones can be left by best fit


def test_rows_spread_evenly():
    plan = plan_microbatches([5, 5, 5, 5, 2, 2, 2, 2], 14, None)
    assert [sum([5, 5, 5, 5, 2, 2, 2, 2][row] for row in part) for part in plan] == [14, 14]


def test_an_overlong_row_is_alone():
    assert set(plan_microbatches([3, 100, 4], 10, None)) == {(1,), (0, 2)}


def test_no_rows_give_one_dummy():
    assert plan_microbatches([], 10, None) == ((),)


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="token_budget 0"):
        plan_microbatches([1], 0, None)
    with pytest.raises(ShapeError, match="row 1 has no token"):
        plan_microbatches([1, 0], 5, None)


LENGTHS = ([9, 1, 7, 7], [], [2])


def _check_agreement() -> None:
    mine = LENGTHS[dist.get_rank()]
    plan = plan_microbatches(mine, 9, dist.group.WORLD, 2)
    assert len(plan) == 4  # rank 0 needs three: 9, 7 + 1, 7; rounded up to a multiple of two
    assert sorted(row for part in plan for row in part) == list(range(len(mine)))


@pytest.mark.dist
def test_ranks_agree_on_the_count():
    run_ranks(3, _check_agreement)
