"""Penalties and normalisation of rewards against hand-computed numbers and numpy."""

import numpy as np
import pytest
import torch

from rlhf.algos.shaping import group_standardised, overlong_penalty, short_penalty, standardised
from rlhf.errors import ShapeError


def test_short_responses_pay_and_those_of_min_tokens_do_not():
    found = short_penalty(torch.tensor([0, 2, 3, 9]), min_tokens=3, penalty=0.5)
    assert found.tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_overlong_penalty_is_equation_13():
    def equation(length: int, most: int, cache: int) -> float:
        if length <= most - cache:
            return 0.0
        if length <= most:
            return ((most - cache) - length) / cache
        return -1.0

    lengths = torch.arange(0, 30)
    for most, cache in ((20, 8), (20, 1), (20, 20), (25, 3)):
        found = overlong_penalty(lengths, max_tokens=most, cache_tokens=cache, penalty=1.0)
        assert found.tolist() == pytest.approx([equation(int(n), most, cache) for n in lengths])
        doubled = overlong_penalty(lengths, max_tokens=most, cache_tokens=cache, penalty=2.0)
        torch.testing.assert_close(doubled, 2 * found)


def test_without_a_cache_the_penalty_is_a_step():
    found = overlong_penalty(torch.tensor([4, 5, 6, 7]), max_tokens=5, cache_tokens=0, penalty=1.5)
    assert found.tolist() == [0.0, 0.0, -1.5, -1.5]


def test_standardised_by_given_moments():
    found = standardised(torch.tensor([1.0, 5.0]), mean=3.0, variance=4.0)
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0]))
    assert standardised(torch.tensor([0.7]), mean=float(torch.tensor(0.7)), variance=0.0).tolist() == [0.0]


def test_groups_are_standardised_apart():
    generator = np.random.default_rng(1)
    values = generator.normal(5.0, 2.0, 12)
    groups = np.array([70, 3, 3, 70, 9, 3, 9, 70, 3, 70, 9, 9])
    counts = np.ones(12, dtype=bool)
    counts[[2, 8]] = False
    dirty = values.copy()
    dirty[2] = np.nan
    found = group_standardised(
        torch.tensor(dirty, dtype=torch.float32), torch.tensor(counts), torch.tensor(groups)
    ).numpy()
    for group in (3, 9, 70):
        mine = (groups == group) & counts
        expected = (values[mine] - values[mine].mean()) / values[mine].std()
        np.testing.assert_allclose(found[mine], expected, rtol=1e-5)  # float32 in and out
    assert found[[2, 8]].tolist() == [0.0, 0.0]


def test_equal_values_and_single_ones_become_zero():
    values, counts = torch.tensor([0.7, 0.7, 3.0]), torch.ones(3, dtype=torch.bool)
    assert group_standardised(values, counts, torch.tensor([1, 1, 2])).tolist() == [0.0, 0.0, 0.0]
    assert group_standardised(values[:0], counts[:0], torch.empty(0, dtype=torch.int64)).tolist() == []


def test_misfit_groups_are_refused():
    with pytest.raises(ShapeError, match="groups"):
        group_standardised(torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64))
