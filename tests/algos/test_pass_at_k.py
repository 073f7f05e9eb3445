"""pass@k against the binomial formula and against all subsets."""

from itertools import combinations
from math import comb

import pytest

from rlhf.algos.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_it_is_the_share_of_k_subsets_with_a_solution(n):
    for solved in range(n + 1):
        tries = [True] * solved + [False] * (n - solved)
        for k in range(1, n + 1):
            subsets = list(combinations(tries, k))
            assert pass_at_k(n, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_binomial_formula_at_numbers_of_the_paper():
    for solved in (1, 17, 150):
        assert pass_at_k(200, solved, 100) == pytest.approx(1 - comb(200 - solved, 100) / comb(200, 100))


def test_with_one_try_it_is_the_mean():
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)
