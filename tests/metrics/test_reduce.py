"""Spread of numbers over ranks: by hand, and over real gloo ranks."""

import math

import pytest

from rlhf.metrics.spread import MinMeanMax
from tests.harness.ranks import run_ranks


def test_spread_by_hand():
    assert MinMeanMax.of({4: 1.0, 5: 6.0, 7: 2.0}) == MinMeanMax(1.0, 3.0, 6.0, max_rank=5, num_ranks=3)


def test_the_lowest_of_equally_slow_ranks_is_named():
    assert MinMeanMax.of({2: 6.0, 1: 6.0}).max_rank == 1


def test_nan_on_one_rank_shows_in_all_three_and_names_the_rank():
    spread = MinMeanMax.of({0: 1.0, 3: math.nan})
    assert all(map(math.isnan, (spread.min, spread.mean, spread.max)))
    assert spread.max_rank == 3


def test_infinity_is_kept():
    assert MinMeanMax.of({0: 1.0, 1: math.inf}).max == math.inf
    assert math.isnan(MinMeanMax.of({0: -math.inf, 1: math.inf}).mean)


def _check() -> None:
    import torch.distributed as dist

    from rlhf.metrics.reduce import reduce_over_ranks

    rank = dist.get_rank()
    # different keys on different ranks, none on rank 2
    mine = {0: {"b": 1.0, "a": 10.0}, 1: {"b": 4.0, "c": -1.0}, 2: {}}[rank]
    assert reduce_over_ranks(mine, dist.group.WORLD) == {
        "a": MinMeanMax(10.0, 10.0, 10.0, 0, 1),
        "b": MinMeanMax(1.0, 2.5, 4.0, 1, 2),
        "c": MinMeanMax(-1.0, -1.0, -1.0, 1, 1),
    }
    pair = dist.new_group([1, 2], backend="gloo")
    if rank:  # ranks are named by their number in the job, not in the group
        assert reduce_over_ranks({"x": float(rank)}, pair) == {"x": MinMeanMax(1.0, 1.5, 2.0, 2, 2)}
    assert reduce_over_ranks({}, dist.group.WORLD) == {}


@pytest.mark.dist
def test_ranks_may_have_different_keys_and_groups():
    run_ranks(3, _check)
