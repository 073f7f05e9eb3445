"""One engine whose two ranks lie on two hosts, as far as it can tell: weights, answers, listeners, losses, end."""

from pathlib import Path

import pytest

from rlhf.config.parallel import ParallelConfig
from tests.harness.ranks import run_ranks
from tests.rollout.sglang.multi_host.node_ranks import (
    a_wrong_interface_is_named,
    engine_on_two_nodes,
    sleep_counts_the_memory_of_all_hosts,
    uneven_nodes_are_refused,
    what_a_team_on_two_nodes_tells,
)
from tests.rollout.sglang.tiny import needs_sglang
from tests.rollout.sglang.weights.test_weights import ALIGNED, case_of
from tests.rollout.tiny import hf_model

pytestmark = [*needs_sglang, pytest.mark.dist, pytest.mark.timeout(600)]  # engines start and start again


def test_an_engine_on_two_nodes_answers_as_on_one_also_when_it_was_lost_and_begun_again(tmp_path: Path) -> None:
    case = case_of(hf_model("qwen3", **ALIGNED), tmp_path, ParallelConfig(tp=2, pp=2), first_rank=1, ep=1)
    run_ranks(4, engine_on_two_nodes, case)


def test_an_engine_with_more_ranks_on_one_node_than_on_the_other_is_refused_on_all_of_them() -> None:
    run_ranks(3, uneven_nodes_are_refused)


def test_starts_that_fail_and_losses_are_told_with_their_nodes_on_all_ranks() -> None:
    run_ranks(4, what_a_team_on_two_nodes_tells)


def test_what_sleep_frees_is_counted_on_all_hosts() -> None:
    run_ranks(4, sleep_counts_the_memory_of_all_hosts)


def test_an_interface_that_is_not_there_is_named_on_all_ranks() -> None:
    run_ranks(4, a_wrong_interface_is_named)
