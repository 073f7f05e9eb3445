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

pytestmark = [pytest.mark.dist, pytest.mark.slow, *needs_sglang]

CO_LOCATED = ()
"""As the learning test has it: two engines of two ranks each on the actor's four, tp2 pp2."""
APART = (
    *("actor.parallel.pp=1", "actor.parallel.layers_per_stage=[]", "critic.parallel.tp=2", "reference.parallel.dp=2"),
    *("rollout.first_rank=2", "rollout.tp=1"),
)
"""Models on two ranks, an engine on each of two others."""
LIMIT = timedelta(seconds=300)
"""Of a collective; ranks outside the rollout pool wait in one while engines start."""


def learns(folder: Path, settings: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=LIMIT)
    check_learned(*solved_before_and_after(folder, groups, "same_parity", "rollout.engine=sglang", *settings))


@pytest.mark.parametrize("settings", [CO_LOCATED, APART], ids=["co-located tp2", "apart tp1"])
def test_ppo_learns_a_toy_task_with_rollouts_of_sglang(tmp_path: Path, settings: tuple[str, ...]) -> None:
    make_files(tmp_path, ffn_size=64)  # on CPUs SGLang wants shares of 32
    make_prompts(tmp_path)
    run_ranks(4, learns, tmp_path, settings)
