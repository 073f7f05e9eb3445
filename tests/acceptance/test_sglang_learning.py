"""The learning test of four ranks with rollouts from SGLang: engines on the ranks that train, and on ranks apart."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from rlhf.dist.groups import GroupFactory
from tests.harness.ranks import run_ranks
from tests.rollout.sglang.tiny import needs_sglang
from tests.trainers.test_learning import check_learned, make_prompts, solved_before_and_after
from tests.trainers.tiny_run import make_files

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900), *needs_sglang]

CO_LOCATED_TP2 = ()
"""As the learning test has it: two engines of two ranks each on the actor's four, tp2 pp2."""
CO_LOCATED_TP1 = ("rollout.tp=1", "rollout.dp=4")
"""An engine on each of these."""
TWO_RANKS = (
    *("actor.parallel.pp=1", "actor.parallel.layers_per_stage=[]", "critic.parallel.tp=2", "reference.parallel.dp=2"),
    "rollout.first_rank=2",
)
"""Models on two ranks, engines on two others."""
APART_TP1 = (*TWO_RANKS, "rollout.tp=1")
APART_TP2 = (*TWO_RANKS, "rollout.tp=2", "rollout.dp=1")
LIMIT = timedelta(seconds=300)
"""Of a collective; ranks outside the rollout pool wait in one while engines start."""


def learns(folder: Path, settings: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=LIMIT)
    check_learned(*solved_before_and_after(folder, groups, "same_parity", "rollout.engine=sglang", *settings))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(CO_LOCATED_TP1, id="co-located tp1", marks=pytest.mark.proof),
        pytest.param(CO_LOCATED_TP2, id="co-located tp2"),
        pytest.param(APART_TP1, id="apart tp1"),
        pytest.param(APART_TP2, id="apart tp2", marks=pytest.mark.proof),
    ],
)
def test_ppo_learns_a_toy_task_with_rollouts_of_sglang(tmp_path: Path, settings: tuple[str, ...]) -> None:
    make_files(tmp_path, ffn_size=64)  # on CPUs SGLang wants shares of 32
    make_prompts(tmp_path)
    run_ranks(4, learns, tmp_path, settings)
