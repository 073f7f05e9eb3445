"""Checks of an engine pool on gloo ranks; every function is called on all of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from random import Random

import pytest
import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import PromptBatch, PromptRecord, Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineLostError
from rlhf.rollout.answers import Answers
from rlhf.rollout.feed import Feed, Load, Verdict, Work
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.pool import EnginePool, store_of_job
from tests.rollout.tiny import hf_model, make_engine

SAMPLES = 3


def leaders_group(config: RolloutConfig) -> dist.ProcessGroup | None:
    """gloo, over the first ranks of the engines; None elsewhere."""
    leaders = [ranks[0] for ranks in config.engines]
    group = dist.new_group(leaders, backend="gloo", timeout=timedelta(seconds=60))
    return group if dist.get_rank() in leaders else None


def rows(prompt_ids: list[int], *, longest: int = 30) -> PromptBatch:
    """SAMPLES rows of each prompt, whose tokens follow from its id."""
    prompts = [
        torch.randint(1, 131, (1 + Random(p).randrange(longest),), generator=torch.Generator().manual_seed(p))
        for p in prompt_ids
        for _ in range(SAMPLES)
    ]
    ids = torch.tensor(prompt_ids, dtype=torch.int64).repeat_interleave(SAMPLES)
    return PromptBatch(
        ids * SAMPLES + torch.arange(SAMPLES).repeat(len(prompt_ids)),
        ids,
        Ragged.of(prompts, dtype=torch.int64),
        tuple(PromptRecord(f"prompt {p}", "", {}) for p in ids.tolist()),
    )


def same(a: Rollout, b: Rollout) -> None:
    """Equal to the bit, records too."""
    assert a.prompts.records == b.prompts.records
    for x, y in zip(Answers.of(a)._columns(), Answers.of(b)._columns(), strict=True):
        for u, v in ((x.values, y.values), (x.lengths, y.lengths)) if isinstance(x, Ragged) else ((x, y),):
            assert torch.equal(u, v)


def gathered(value: object) -> list:
    """Every rank's."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@dataclass(slots=True)
class WatchedFeed:
    """A feed that tells before every round of its engine how many rows the engine has."""

    feed: Feed
    on_round: Callable[[int], None]
    rows: int = 0

    def take(self, load: Load) -> Work | None:
        work = self.feed.take(load)
        self.rows += 0 if work is None else len(work.prompts)
        return work

    def done(self, finished: Rollout) -> None:
        self.rows -= len(finished)
        self.feed.done(finished)

    def verdict(self) -> Verdict:
        self.on_round(self.rows)
        return self.feed.verdict()


@dataclass(slots=True)
class WatchedEngine:
    """An engine of one rank whose rounds can be watched, held up, or ended by an error."""

    engine: NativeEngine
    on_round: Callable[[int], None]

    def run(self, feed: Feed, sampling: SamplingConfig) -> None:
        self.engine.run(WatchedFeed(feed, self.on_round), sampling)


class LockedSteps:
    """Engines on ranks of their own step in turn: none begins a step before all that have rows have ended the last.

    So a step of each takes the same time, however the machine shares its cores among them. Counts the steps.
    """

    def __init__(self, store: dist.Store, number: int, count: int) -> None:
        self._store, self._number, self._count = store, number, count
        self.steps = 0
        store.set(f"at/{number}", "0")

    def __call__(self, rows: int) -> None:
        """Before each round."""
        self.steps += rows > 0
        now = max([self.steps, *self._all()]) if not rows else self.steps
        self._store.set(f"at/{self._number}", str(_IDLE if not rows else now))
        while rows and min(self._all()) < self.steps:
            time.sleep(0.0002)

    def _all(self) -> list[int]:
        return [int(self._store.get(f"at/{n}")) for n in range(self._count)]


_IDLE = 10**9


def make_pool(engine: object, config: RolloutConfig, name: str, **settings: object) -> EnginePool:
    return EnginePool(
        engine,  # type: ignore[arg-type]  # all that the pool asks of it
        config,
        rank=dist.get_rank(),
        leaders_group=leaders_group(config),
        store=store_of_job(name),
        **settings,
    )


def four_engines() -> None:
    """All checks with four engines of one rank each."""
    torch.set_num_threads(1)
    rank, config = dist.get_rank(), RolloutConfig(dp=4, max_running=6, kv_cache_tokens=4096)
    engine = make_engine(hf_model("qwen3"), max_running=6, dp=4, eos_token_ids=tuple(range(9)))
    pool = make_pool(engine, config, "pool")
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=60)
    mine = rows(list(range(rank, 30, 4)))
    expected = engine.generate(mine, sampling)
    _keys_are_cleaned_up(lambda: same(pool.generate(mine, sampling), expected))
    _rows_differ_in_number(pool, engine, sampling)
    _an_engine_takes_no_part(pool, mine, expected, sampling)
    _the_first_are_kept(pool, mine, expected, sampling)
    _engines_are_lost(engine, config, mine, expected, sampling)
    _even_in_lockstep(engine, config)


def _keys_are_cleaned_up(call: Callable[[], None]) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    call()
    dist.barrier()
    assert store.num_keys() == before
    dist.barrier()


def _rows_differ_in_number(pool: EnginePool, engine: NativeEngine, sampling: SamplingConfig) -> None:
    """One leader has many rows, one none."""
    rank = dist.get_rank()
    mine = rows([100 * rank + at for at in range((0, 11, 2, 1)[rank])])
    same(pool.generate(mine, sampling), engine.generate(mine, sampling) if rank else Rollout.empty())


def _an_engine_takes_no_part(pool: EnginePool, mine: PromptBatch, expected: Rollout, sampling: SamplingConfig) -> None:
    rank, asked = dist.get_rank(), []
    watched = make_pool(WatchedEngine(pool.engine, asked.append), pool._config, "part")
    same(watched.generate(mine, sampling, takes_part=rank != 2), expected)
    assert bool(asked) == (rank != 2)
    assert pool.generate(mine, sampling, takes_part=False) is None


def _the_first_are_kept(pool: EnginePool, mine: PromptBatch, expected: Rollout, sampling: SamplingConfig) -> None:
    """20 of 30 prompts; the others go on in a second call and end as if nothing had stopped them."""
    rank, everything = dist.get_rank(), rows(list(range(30)))
    first = pool.ask(mine, sampling, keep=20)
    assert len(first.kept) == 20
    assert len(first.answers) == 5 * SAMPLES
    assert sorted(first.kept + first.left) == list(range(30))
    assert gathered((first.kept, first.left)) == [(first.kept, first.left)] * 4
    assert first.answers.prompt_ids.tolist() == [p for p in first.kept[rank::4] for _ in range(SAMPLES)]
    begun = gathered(first.begun.sample_ids.tolist())
    assert len({i for ids in begun for i in ids}) == sum(map(len, begun)) <= 10 * SAMPLES
    assert {i // SAMPLES for ids in begun for i in ids} <= set(first.left)
    then = pool.ask(rows(list(first.left[rank::4])), sampling, keep=10, begun=first.begun)
    assert then.kept == first.left
    assert len(then.begun) == 0
    whole = gathered((first.answers, then.answers, expected))
    answers = Answers.concat([part for parts in whole for part in parts[:2]]).ordered_as(everything.sample_ids)
    uninterrupted = Answers.concat([Answers.of(parts[2]) for parts in whole]).ordered_as(everything.sample_ids)
    same(answers.rollout(everything), uninterrupted.rollout(everything))
    assert sum(len(parts[0]) for parts in whole) == 20 * SAMPLES


def _engines_are_lost(
    engine: NativeEngine, config: RolloutConfig, mine: PromptBatch, expected: Rollout, sampling: SamplingConfig
) -> None:
    """Two of four while they have rows; then all."""
    rank = dist.get_rank()

    def lost_in_round(number: int, *ranks: int) -> Callable[[int], None]:
        rounds = count()

        def on_round(rows: int) -> None:
            if rank in ranks and next(rounds) >= number and rows:
                raise EngineLostError("its host was killed")

        return on_round

    pool = make_pool(WatchedEngine(engine, lost_in_round(6 + rank, 1, 3)), config, "two", outlives_loss=True)
    same(pool.generate(mine, sampling), expected)
    assert gathered(str(pool.lost)) == ["None", "its host was killed"] * 2
    assert pool.complete
    pool = make_pool(WatchedEngine(engine, lost_in_round(6 + rank, 0, 1, 2, 3)), config, "all", outlives_loss=True)
    reply = pool.ask(mine, sampling)
    assert reply.stats.lost_engines == reply.stats.engines == 4
    assert reply.left
    assert not pool.complete
    again = make_pool(engine, config, "again").ask(
        rows([p for p in reply.left if p % 4 == rank]), sampling, begun=reply.begun
    )
    assert again.kept == reply.left
    pool = make_pool(WatchedEngine(engine, lost_in_round(0, rank)), config, "none", outlives_loss=True)
    with pytest.raises(EngineLostError, match="all engines are lost"):
        pool.generate(mine, sampling)
    dist.barrier()


def _even_in_lockstep(engine: NativeEngine, config: RolloutConfig) -> None:
    """Responses of 1 to 60 tokens by the model's own stop tokens; busy is in decode steps, all equally long."""
    rank = dist.get_rank()
    locked = LockedSteps(store_of_job("locked"), rank, 4)
    pool = make_pool(WatchedEngine(engine, locked), config, "even")
    dist.barrier()
    reply = pool.ask(rows(list(range(rank, 200, 4))), SamplingConfig(temperature=1.0, max_new_tokens=60))
    lengths = reply.answers.responses.lengths
    assert lengths.min() <= 3
    assert lengths.max() >= 40
    assert lengths.float().median() < lengths.max() / 3
    steps = gathered(locked.steps)
    assert max(steps) / (sum(steps) / 4) <= 1.1, steps
    assert reply.stats.moved > 0  # the plan alone was not even


class LostEngine:
    """Takes rows once and is then lost, on all of its ranks."""

    def run(self, feed: Feed | None, sampling: SamplingConfig) -> None:
        if feed is not None:
            feed.take(Load(0, 0))
        raise EngineLostError("its host was killed")


def _all_ranks_of_an_engine_learn_what_came_of_a_call(
    engine: NativeEngine, config: RolloutConfig, mine: PromptBatch | None, expected: Rollout, sampling: SamplingConfig
) -> None:
    rank = dist.get_rank()
    pool = make_pool(engine if rank < 2 else LostEngine(), config, "one lost", outlives_loss=True)
    found = pool.generate(mine, sampling)
    assert (pool.lost is None, pool.complete) == (rank < 2, True)
    if mine is not None:
        same(found, expected)
    pool = make_pool(LostEngine(), config, "all lost", outlives_loss=True)
    with pytest.raises(EngineLostError, match="all engines are lost"):
        pool.generate(mine, sampling)
    assert gathered(pool.complete) == [False] * 4
    with pytest.raises(EngineLostError, match="its host was killed"):
        make_pool(LostEngine(), config, "stop").generate(mine, sampling)


def two_engines_of_two() -> None:
    """Two engines of two ranks: what an engine's other rank gets is None, and rows are the engine's own to the bit."""
    torch.set_num_threads(1)
    rank, config = dist.get_rank(), RolloutConfig(tp=2, dp=2, max_running=6, kv_cache_tokens=4096)
    groups = [dist.new_group(list(ranks), backend="gloo") for ranks in config.engines]
    group = groups[rank // 2]
    engine = make_engine(
        hf_model("qwen3"), rank=rank, groups=(group, group), tp=2, dp=2, max_running=6, eos_token_ids=tuple(range(9))
    )
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=30)
    leads = rank % 2 == 0
    mine = rows(list(range(rank // 2, 9, 2))) if leads else None
    expected = engine.generate(mine, sampling)
    found = make_pool(engine, config, "tp").generate(mine, sampling)
    if leads:
        same(found, expected)
    else:
        assert found is None
    batches = RolloutConfig(tp=2, dp=2, max_running=6, kv_cache_tokens=4096, batching="buckets", bucket_tokens=(8, 16))
    reply = make_pool(engine, batches, "buckets").ask(mine, sampling)
    if leads:
        same(reply.answers.rollout(mine), expected)
        assert 0 < reply.stats.padding_waste < 1
    _all_ranks_of_an_engine_learn_what_came_of_a_call(engine, config, mine, expected, sampling)
