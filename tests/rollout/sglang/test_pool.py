"""Four engines on SGLang are one: evenly busy, each with its prefixes, and no row is lost when a tail is stopped."""

from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.rollout.sglang.pool_ranks import four_engines
from tests.rollout.sglang.tiny import needs_sglang

pytestmark = [*needs_sglang, pytest.mark.dist, pytest.mark.timeout(600)]  # engines start and start again


def test_four_engines_are_even_share_prefixes_and_go_on_with_a_tail_under_new_weights(tmp_path: Path) -> None:
    run_ranks(4, four_engines, tmp_path)
