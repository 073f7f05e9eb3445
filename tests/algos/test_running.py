"""Moments over a run against numpy, however the numbers are cut and whoever holds them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algos.running import RunningMoments

REL = (
    1e-9  # float64 merges of some hundred numbers whose mean is up to 1e4 times their spread: 1e-16 * (1e4)^2 and room
)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6), shift=st.floats(-1e4, 1e4), seed=st.integers(0, 10**6)
)
def test_merged_parts_are_the_moments_of_the_whole(sizes, shift, seed):
    values = np.random.default_rng(seed).normal(shift, 1.0, sum(sizes) + 2)
    cuts = np.cumsum(sizes)
    parts = [RunningMoments.of(torch.tensor(part)) for part in np.split(values, cuts)]
    for order in (parts, parts[::-1]):
        found = RunningMoments.merged(order)
        assert found.count == len(values)
        assert found.mean == pytest.approx(values.mean(), rel=REL, abs=REL)
        assert found.variance == pytest.approx(values.var(), rel=REL)


def test_hand_computed():
    found = RunningMoments.of(torch.tensor([1.0, 3.0])) + RunningMoments.of(torch.tensor([8.0]))
    assert (found.count, found.mean) == (3, 4)
    assert found.variance == pytest.approx((9 + 1 + 16) / 3)


def test_a_mean_far_from_zero_costs_no_digits():
    """Sums of squares in float64 would have lost the variance: 1e9 squared is 1e18, and 53 bits hold 1e16."""
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    found = RunningMoments.merged(RunningMoments.of(values[i : i + 1]) for i in range(3))
    assert found.variance == pytest.approx(2 / 3)


def test_what_is_not_finite_never_enters():
    found = RunningMoments.of(torch.tensor([1.0, float("nan"), 3.0, float("inf"), -float("inf")]))
    assert (found.count, found.mean, found.variance) == (2, 2, 1)
    assert RunningMoments.of(torch.tensor([float("nan")])) == RunningMoments()


def test_parts_without_values_change_no_bit():
    found = RunningMoments.of(torch.tensor([0.1, 0.7, 0.3]))
    nothing = RunningMoments.of(torch.empty(0))
    assert nothing + found == found + nothing == RunningMoments.merged([nothing, found, nothing]) == found
