"""Engines of several ranks answer as one, to the bit, whoever answers what and whoever is lost."""

import pytest

from tests.harness.ranks import run_ranks
from tests.rollout.pool_ranks import four_engines, two_engines_of_two


@pytest.mark.dist
def test_four_engines_answer_as_one_evenly_and_without_those_that_are_lost() -> None:
    run_ranks(4, four_engines)


@pytest.mark.dist
def test_engines_of_two_ranks_answer_as_one_in_batches_too() -> None:
    run_ranks(4, two_engines_of_two)
