"""Engines of several ranks answer as one, to the bit, whoever answers what and whoever is lost."""

import pytest

from tests.harness.ranks import run_ranks
from tests.rollout.pool_ranks import four_engines, two_engines_of_two
from tests.rollout.pool_steps import random_runs


@pytest.mark.dist
def test_four_engines_answer_as_one_evenly_and_without_those_that_are_lost() -> None:
    run_ranks(4, four_engines)


@pytest.mark.dist
def test_engines_of_two_ranks_answer_as_one_in_batches_too() -> None:
    run_ranks(4, two_engines_of_two)


@pytest.mark.dist
def test_no_prompt_is_lost_or_learned_from_twice_whatever_is_stopped_continued_batched_left_out_and_lost() -> None:
    """Twenty random runs of four steps on simulated engines."""
    run_ranks(4, random_runs, 0)
