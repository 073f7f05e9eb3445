"""Engines that are lost as they start for the first time."""

from dataclasses import dataclass

import pytest
import torch.distributed as dist

from rlhf.build.engine_start import EngineStart
from rlhf.config.rollout import RolloutConfig
from rlhf.errors import EngineError, EngineLostError
from rlhf.trainers.recovery import Losses
from tests.harness.ranks import run_ranks
from tests.trainers.losable import LOST


@dataclass
class Factory:
    """Its first engines are lost as they start."""

    losses: int
    made: int = 0

    def __call__(self) -> str:
        self.made += 1
        if self.made <= self.losses:
            raise EngineLostError(LOST)
        return f"engine {self.made}"


def test_without_replacement_the_loss_is_raised_and_names_the_process():
    with pytest.raises(EngineLostError, match=r"scheduler tp 0 \(pid 1\) was ended by SIGKILL"):
        EngineStart(Factory(1), survives_loss=False)


def test_what_is_no_loss_is_not_tried_again():
    made = []

    def refused():
        made.append(1)
        raise EngineError("sglang engine: no such argument")

    with pytest.raises(EngineError, match="no such argument"):
        EngineStart(refused, survives_loss=True)
    assert len(made) == 1


def test_a_run_that_survives_no_loss_settles_without_a_word():
    config = RolloutConfig()
    start = EngineStart(Factory(0), survives_loss=False)
    assert start.settled(Losses(config, rank=0, group=None)) == "engine 1"


def _starts() -> None:
    """Rank 2 is the actor's alone."""
    rank, group, said = dist.get_rank(), dist.new_group([0, 1, 2], backend="gloo"), list[str]()
    config = RolloutConfig(dp=2, on_loss="replace", max_losses=3)
    losses = Losses(config, rank=rank, group=group, say=said.append)
    factory = Factory((2, 1, 0)[rank])
    start = EngineStart(factory if rank < 2 else None, survives_loss=True)
    assert start.settled(losses) == ("engine 3", "engine 2", None)[rank]
    assert (losses.num, factory.made) == (3, (3, 2, 0)[rank])
    assert said == ["engine_0: scheduler tp 0 (pid 1) was ended by SIGKILL; it is replaced"] * 3
    dist.barrier()
    again = EngineStart(Factory((0, 1, 0)[rank]) if rank < 2 else None, survives_loss=True)
    with pytest.raises(EngineLostError, match=r"rollout\.max_losses: 4 engines lost since the job started, 3 may be"):
        again.settled(losses)


@pytest.mark.dist
def test_engines_that_are_lost_at_first_are_started_again_and_all_ranks_count_them() -> None:
    run_ranks(3, _starts)
