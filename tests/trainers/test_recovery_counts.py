"""Engines that are lost between a sync and the question: each row is answered once, by whoever is left."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineLostError
from rlhf.rollout.feed import Feed, Load, Verdict
from rlhf.trainers.recovery import Losses, Recovery
from tests.harness.ranks import run_ranks
from tests.rollout.pool_ranks import gathered, make_pool, rows
from tests.trainers.losable import LOST

SAMPLING = SamplingConfig(max_new_tokens=1)


@dataclass
class CountingEngine:
    """Answers every row with one token, and keeps the ids of the rows that it was given."""

    given: list[int] = field(default_factory=list)
    restarts: int = 0

    def run(self, feed: Feed, sampling: SamplingConfig) -> None:
        while feed.verdict() is Verdict.GO_ON:
            work = feed.take(Load(0, 0))
            if work is None:
                time.sleep(0.001)
                continue
            self.given += work.prompts.sample_ids.tolist()
            ones = torch.ones(len(work.prompts), dtype=torch.int64)
            finish = torch.ones(len(ones), dtype=torch.int8)
            tokens, logprobs, provenance, versions = (
                Ragged(ones.to(dtype), ones) for dtype in (torch.int64, torch.float32, torch.uint8, torch.int32)
            )
            feed.done(Rollout(work.prompts, tokens, logprobs, finish, provenance, versions))

    def restart(self) -> None:
        self.restarts += 1


def _go(name: str, *, lost: Collection[int], left_out: Collection[int], tries: int) -> None:
    """Engines of ranks `lost` are lost at the end of the first sync, as they hear of their new version."""
    rank, engine, syncs = dist.get_rank(), CountingEngine(), list[int]()
    config = RolloutConfig(dp=2, on_loss="replace")
    pool = make_pool(engine, config, name, outlives_loss=True)
    group = dist.new_group([0, 1], backend="gloo")
    losses = Losses(config, rank=rank, group=group)
    recovery = Recovery(config, losses=losses, engine=engine, seen_lost=lambda: pool.lost)  # type: ignore[arg-type]

    def update() -> None:
        syncs.append(1)
        if rank in lost and len(syncs) == 1:
            raise EngineLostError(LOST)

    def ask(_: None) -> Rollout | None:
        return pool.generate(mine, SAMPLING, takes_part=rank not in left_out, is_lost=recovery.is_lost)

    mine = rows(list(range(rank, 9, 2)))
    _, rollout = recovery.go(update, ask)
    assert rollout.prompts.sample_ids.tolist() == mine.sample_ids.tolist()
    assert sorted(i for ids in gathered(engine.given) for i in ids) == list(range(27)), (name, engine.given)
    assert (len(syncs), engine.restarts, recovery.num_losses) == (tries, rank in lost, len(lost))
    assert not recovery.is_lost


def _counted() -> None:
    torch.set_num_threads(1)
    _go("nobody is lost", lost=(), left_out=(), tries=1)
    _go("one is lost, and the other answers for it", lost=(1,), left_out=(), tries=1)
    _go("both are lost, so nobody can be asked", lost=(0, 1), left_out=(), tries=2)
    _go("one is lost, the other holds wrong weights", lost=(1,), left_out=(0,), tries=2)


@pytest.mark.dist
def test_a_loss_after_the_sync_makes_no_engine_answer_twice() -> None:
    run_ranks(2, _counted)
