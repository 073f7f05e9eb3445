"""Steps of random runs on a real pool over simulated engines; every function is called on all of four ranks.

In each run everything is at once: more prompts than are kept, a tail that is dropped or continued, batches, engines
that are left out or lost, all of them too.
"""

import time
from dataclasses import dataclass, field
from random import Random

import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch, PromptRecord
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineLostError
from rlhf.rollout.answers import Answers
from rlhf.rollout.feed import Feed
from rlhf.rollout.pool import EnginePool, store_of_job
from tests.rollout.pool_ranks import gathered, leaders_group
from tests.rollout.simulated import SimulatedEngine

ENGINES, RUNS, STEPS, LONGEST = 4, 20, 4, 40
NEVER = 10**9
SAMPLING = SamplingConfig(max_new_tokens=LONGEST + 1)


def response_tokens(sample_id: int) -> int:
    """How long the response to a sample is."""
    return 1 + int(LONGEST * Random(sample_id).random() ** 3)


class _Lengths(dict[int, int]):
    def __missing__(self, sample_id: int) -> int:
        return response_tokens(sample_id)


@dataclass(slots=True)
class LosableEngine:
    """A simulated engine that is lost in some round of a run, and there again in the next."""

    slots: int
    kv_tokens: int
    version: int = 0
    lost_in: int = NEVER
    lengths: _Lengths = field(default_factory=_Lengths)

    def run(self, feed: Feed, sampling: SamplingConfig) -> None:
        engine = SimulatedEngine(
            feed, self.lengths, self.slots, self.kv_tokens, max_new_tokens=sampling.max_new_tokens, version=self.version
        )
        pace, rounds = Random(dist.get_rank() + self.version), 0
        while not engine.over:
            if rounds == self.lost_in:
                raise EngineLostError("its host was killed")
            engine.round()
            rounds += 1
            time.sleep(pace.random() * 0.001)


@dataclass(slots=True)
class Course:
    """A run: how it goes, the same on all ranks, and what came of it so far."""

    random: Random
    samples: int
    wanted: int
    """Prompts a step."""
    extra: int
    continues: bool
    cursor: int = 0
    left: tuple[int, ...] = ()
    learned: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    begun: Answers = field(default_factory=Answers.empty)
    """Of this leader."""
    stale: int = 0

    def draw(self) -> tuple[int, ...]:
        """Prompts of a step; those that were begun are the first."""
        asked = [*self.left]
        while len(asked) < self.wanted + self.extra:
            asked.append(self.cursor)
            self.cursor += 1
        return tuple(asked)

    def rows(self, prompt_ids: tuple[int, ...]) -> PromptBatch:
        """Those that this leader brings or gets."""
        mine = prompt_ids[dist.get_rank() :: ENGINES]
        ids = torch.tensor([p * self.samples + k for p in mine for k in range(self.samples)], dtype=torch.int64)
        prompts = [torch.full((1 + p * 7 % 30,), 10 + p) for p in mine for _ in range(self.samples)]
        return PromptBatch(
            ids, ids // self.samples, Ragged.of(prompts, dtype=torch.int64), (PromptRecord("", "", {}),) * len(ids)
        )


def random_runs(first_seed: int) -> None:
    """RUNS runs; that each thing happened in some is checked too."""
    torch.set_num_threads(1)
    group = leaders_group(RolloutConfig(dp=ENGINES))
    seen = {"lost": 0, "all lost": 0, "stale": 0, "dropped": 0, "left out": 0}
    for seed in range(first_seed, first_seed + RUNS):
        _run(seed, group, seen)
    assert all(seen.values()), seen


def _run(seed: int, group: dist.ProcessGroup | None, seen: dict[str, int]) -> None:
    random = Random(seed)
    batching, slots, kv_tokens = random.choice(["dynamic", "buckets"]), random.randint(1, 6), random.choice([120, 4000])
    config = RolloutConfig(
        dp=ENGINES,
        max_running=slots,
        kv_cache_tokens=kv_tokens,
        batching=batching,
        bucket_tokens=(8, 20),
        sampling=SAMPLING,
    )
    engine = LosableEngine(slots, kv_tokens)
    pool = EnginePool(
        engine,  # type: ignore[arg-type]  # all that the pool asks of it
        config,
        rank=dist.get_rank(),
        leaders_group=group,
        store=store_of_job(f"run {seed}"),
        outlives_loss=True,
    )
    course = Course(random, random.randint(1, 3), random.randint(1, 8), random.randint(0, 8), random.random() < 0.6)
    for step in range(STEPS):
        engine.version = step
        _step(pool, engine, course, step, seen)
    taken = sorted((*course.learned, *course.dropped, *course.left))
    assert taken == list(range(course.cursor)), "a prompt is lost, or was learned from twice"
    seen["dropped"] += len(course.dropped)
    seen["stale"] += sum(gathered(course.stale))


def _step(pool: EnginePool, engine: LosableEngine, course: Course, step: int, seen: dict[str, int]) -> None:
    random, rank, asked = course.random, dist.get_rank(), course.draw()
    left_out = random.choice([None, None, *range(ENGINES)])
    lost_in = [random.choice([NEVER, NEVER, random.randint(0, 12)]) for _ in range(ENGINES)]
    if random.random() < 0.15:
        lost_in = [random.randint(0, 3) for _ in range(ENGINES)]
    seen["left out"] += left_out is not None
    for attempt in range(2):
        engine.lost_in = NEVER if attempt else lost_in[rank]
        prompts = course.rows(asked)
        reply = pool.ask(
            prompts, SAMPLING, keep=course.wanted, begun=course.begun, takes_part=bool(attempt) or rank != left_out
        )
        assert reply is not None
        seen["lost"] += reply.stats.lost_engines
        if pool.complete:
            break
        seen["all lost"] += 1
        course.begun = Answers.concat([reply.answers, reply.begun])
    assert gathered((reply.kept, reply.left)) == [(reply.kept, reply.left)] * ENGINES
    assert len(reply.kept) == course.wanted
    assert sorted((*reply.kept, *reply.left)) == list(asked)
    found = reply.answers.rollout(course.rows(reply.kept))
    ids = found.prompts.sample_ids.tolist()
    assert found.finish_reasons.eq(FinishReason.STOP).all()
    assert found.responses.lengths.tolist() == [response_tokens(i) for i in ids]
    _check_tokens(reply.answers, step)
    _check_tokens(reply.begun, step)
    begun = [i for of_rank in gathered(reply.begun.sample_ids.tolist()) for i in of_rank]
    assert len(begun) == len(set(begun))
    assert {i // course.samples for i in begun} <= set(reply.left)
    course.stale += int((found.policy_versions.values < step).sum())
    course.learned += reply.kept
    if course.continues:
        course.left, course.begun = reply.left, reply.begun
    else:
        course.dropped += reply.left
        course.begun = Answers.empty()


def _check_tokens(answers: Answers, step: int) -> None:
    """Each token once and in its place, by weights that never go back."""
    rows = zip(answers.sample_ids.tolist(), answers.responses.rows(), answers.policy_versions.rows(), strict=True)
    for sample_id, response, versions in rows:
        assert response.tolist() == [sample_id * 1000 + i for i in range(len(response))]
        assert versions.tolist() == sorted(versions.tolist())
        assert versions.le(step).all()
