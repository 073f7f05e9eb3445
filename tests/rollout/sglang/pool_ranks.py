"""Four engines on SGLang behind one pool: how even they are, who has which prefix, and what becomes of a tail.

Every function is called on all four ranks, each of which leads an engine of its own.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf.config.rollout import RolloutConfig, SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch, PromptRecord
from rlhf.data.ragged import Ragged
from rlhf.rollout import routes
from rlhf.rollout.answers import Answers
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.pool import EnginePool, PoolReply
from rlhf.rollout.sglang.engine import SGLangEngine
from rlhf.rollout.sglang.run import SURPLUS
from tests.rollout.pool_ranks import SAMPLES, gathered, make_pool, rows
from tests.rollout.sglang.errands import Counted, CountSteps, LoadWhole
from tests.rollout.sglang.tiny import make_engine
from tests.rollout.tiny import hf_model, reference_logprobs
from tests.rollout.tiny import make_engine as make_native_engine

ENGINES, RUNNING = 4, 6
STEP_S = 0.04
"""A forward pass takes no less: all engines share two cores here, where on GPUs none waits for another."""
STOPS = tuple(range(9))
FAMILIES, MEMBERS, PREFIX = 8, 12, 120


def four_engines(folder: Path) -> None:
    """All checks on the same engines."""
    torch.set_num_threads(1)
    rank, model = dist.get_rank(), hf_model("qwen3", intermediate_size=96)
    config = RolloutConfig(engine="sglang", dp=ENGINES, max_running=RUNNING, kv_cache_tokens=4096)
    monitor = PerformanceMonitor()
    settings = {"max_running": RUNNING, "dp": ENGINES, "eos_token_ids": STOPS}
    engine = make_engine(model, folder / f"logs_{rank}", performance=monitor, **settings)
    try:
        _load(engine, model, folder / "model_5", version=5)
        engine.ask_schedulers(CountSteps(STEP_S))
        pool = make_pool(engine, config, "sglang")
        reply = _even_on_a_skewed_mix(pool, engine)
        _an_engine_alone_and_the_embedded_one_say_the_same(engine, model, reply, settings)
        _a_prefix_is_computed_by_few(pool, engine, monitor)
        _the_tail_is_dropped_or_goes_on_under_new_weights(pool, engine, model, folder / "model_6")
    finally:
        engine.close()


def _load(engine: SGLangEngine, model: Any, folder: Path, *, version: int) -> None:
    """Into all engines; transformers writes on one rank alone."""
    model.save_pretrained(folder)
    dist.barrier()
    engine._entrance.port.begin_update()
    engine._entrance.port.load_window([LoadWhole(folder / "model.safetensors")])
    engine.weights_updated(version)


def _even_on_a_skewed_mix(pool: EnginePool, engine: SGLangEngine) -> PoolReply:
    """600 responses of 1 to 60 tokens, by the model's own stop tokens."""
    dist.barrier()
    engine.ask_schedulers(Counted())
    mine = rows(list(range(dist.get_rank(), 200, ENGINES)))
    reply = pool.ask(mine, SamplingConfig(temperature=1.0, max_new_tokens=60))
    assert reply is not None
    ((passes, _, idle),) = engine.ask_schedulers(Counted())
    assert idle
    counted = gathered((len(passes), sum(passes)))
    lengths = gathered(reply.answers.responses.lengths.tolist())
    lengths = [length for of_leader in lengths for length in of_leader]
    assert len(lengths) == 200 * SAMPLES
    assert min(lengths) <= 3
    assert max(lengths) >= 40
    assert sorted(lengths)[len(lengths) // 2] < max(lengths) / 3
    busiest, mean = max(steps for steps, _ in counted), sum(steps for steps, _ in counted) / ENGINES
    assert mean > 6 * max(lengths), "the longest response alone would decide"
    told = f"forward passes and rows in them: {counted}; busy seconds, max / mean: {reply.stats.busy_spread:.3f}"
    _tell(told)
    assert busiest / mean <= 1.1, told
    return reply


def _tell(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def _an_engine_alone_and_the_embedded_one_say_the_same(
    engine: SGLangEngine, model: Any, reply: PoolReply, settings: dict[str, Any]
) -> None:
    """Of the first rows; a draw between two tokens may fall on the other side, by rounding, but not in many rows.

    Of the rows that were submitted at once, no more run in SGLang than may, and few wait there.
    """
    mine, sampling = rows(list(range(dist.get_rank(), 40, ENGINES))), SamplingConfig(temperature=1.0, max_new_tokens=60)
    engine.ask_schedulers(Counted())
    for part in mine.split([12, len(mine) - 12]):
        engine.submit(part, sampling)
    alone = engine.collect()
    ((passes, waited, _),) = engine.ask_schedulers(Counted())
    assert max(passes) == RUNNING
    assert 0 < max(map(sum, zip(passes, waited, strict=True))) <= RUNNING + SURPLUS
    embedded = make_native_engine(model, **settings).generate(mine, sampling)
    pooled = reply.answers.ordered_as(mine.sample_ids)
    for said in (pooled.responses, alone.responses):
        pairs = zip(said.rows(), embedded.responses.rows(), strict=True)
        assert sum(one.tolist() != other.tolist() for one, other in pairs) <= 1


def _family_rows(seed: int) -> PromptBatch:
    """Of this leader, of prompts of FAMILIES: MEMBERS of each share a prefix; members of a family have one id in 8."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [torch.randint(20, 131, (PREFIX,), generator=generator) for _ in range(FAMILIES)]
    ends = torch.randint(20, 131, (FAMILIES * MEMBERS, 5), generator=generator)
    ids = torch.arange(dist.get_rank(), FAMILIES * MEMBERS, ENGINES)
    tokens = [torch.cat([prefixes[i % FAMILIES], ends[i]]) for i in ids.tolist()]
    return PromptBatch(ids, ids, Ragged.of(tokens, dtype=torch.int64), (PromptRecord("", "", {}),) * len(ids))


def _a_prefix_is_computed_by_few(pool: EnginePool, engine: SGLangEngine, monitor: PerformanceMonitor) -> None:
    """Tokens found in the caches, with prompts of a prefix at one engine, and with the plan blind for prefixes."""
    sampling, found = SamplingConfig(temperature=1.0, max_new_tokens=12, ignore_eos=True), []
    for seed, prefix_tokens in ((1, routes.PREFIX_TOKENS), (2, 10**6)):
        kept, routes.PREFIX_TOKENS = routes.PREFIX_TOKENS, prefix_tokens
        try:
            dist.barrier()
            with monitor.measuring():
                reply = pool.ask(_family_rows(seed), sampling)
        finally:
            routes.PREFIX_TOKENS = kept
        assert reply is not None
        assert len(reply.kept) == FAMILIES * MEMBERS
        found.append(sum(gathered(monitor.window().cached_tokens)))
    most = FAMILIES * (MEMBERS - 1) * PREFIX
    told = (
        f"prompt tokens found in caches: {found[0] / most:.2f} of {most}, by a plan without them {found[1] / most:.2f}"
    )
    _tell(told)
    assert found[0] > 0.5 * most, told
    assert found[0] > found[1] + 0.1 * most, told


def _the_tail_is_dropped_or_goes_on_under_new_weights(
    pool: EnginePool, engine: SGLangEngine, model: Any, folder: Path
) -> None:
    """40 prompts are asked, the first 32 kept; the rest is forgotten in one call, and in another continued."""
    rank, sampling = dist.get_rank(), SamplingConfig(temperature=1.0, max_new_tokens=60)
    mine = rows(list(range(500 + rank, 540, ENGINES)))
    dropped = _first_32(pool, engine, mine, sampling)
    assert gathered(dropped.left) == [dropped.left] * ENGINES
    first = _first_32(pool, engine, mine, sampling)
    other = hf_model("qwen3", intermediate_size=96)
    with torch.no_grad():
        for number, param in enumerate(other.parameters()):
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.02)
    _load(engine, other, folder, version=6)
    begun = dict(zip(first.begun.sample_ids.tolist(), first.begun.responses.rows(), strict=True))
    everyones: dict[int, torch.Tensor] = {key: row for part in gathered(begun) for key, row in part.items()}
    assert {sample_id // SAMPLES for sample_id in everyones} <= set(first.left)
    next_ones = [*first.left, *range(600, 612)][rank::ENGINES]
    asked = rows(next_ones)
    then = pool.ask(asked, sampling, begun=first.begun)
    assert then is not None
    assert then.kept == (*first.left, *range(600, 612))
    assert not then.left
    rollout, stale = then.answers.rollout(asked), 0
    assert FinishReason.ABORT not in rollout.finish_reasons
    columns = zip(
        rollout.prompts.sample_ids.tolist(),
        rollout.prompts.tokens.rows(),
        rollout.responses.rows(),
        rollout.rollout_logprobs.rows(),
        rollout.policy_versions.rows(),
        strict=True,
    )
    for sample_id, prompt, response, logprobs, versions in columns:
        old = everyones.get(sample_id, torch.empty(0, dtype=torch.int64))
        count, stale = len(old), stale + len(old)
        assert response[:count].tolist() == old.tolist()
        assert versions.tolist() == [5] * count + [6] * (len(response) - count)
        for weights, part in ((model, slice(0, count)), (other, slice(count, None))):
            wanted = reference_logprobs(weights, prompt, response)[part]
            torch.testing.assert_close(logprobs[part], wanted, atol=1e-4, rtol=0)
    assert sum(gathered(stale)) > 0


def _first_32(pool: EnginePool, engine: SGLangEngine, mine: PromptBatch, sampling: SamplingConfig) -> PoolReply:
    dist.barrier()
    reply = pool.ask(mine, sampling, keep=32)
    assert reply is not None
    ((_, _, idle),) = engine.ask_schedulers(Counted())
    assert idle, "what was stopped is gone from SGLang too"
    assert (len(reply.kept), len(reply.left)) == (32, 8)
    assert reply.answers.prompt_ids.tolist() == [
        p for p in reply.kept[dist.get_rank() :: ENGINES] for _ in range(SAMPLES)
    ]
    assert FinishReason.ABORT not in reply.answers.finish_reasons
    assert not set(reply.begun.prompt_ids.tolist()) & set(reply.kept)
    stopped: list[Answers] = gathered(reply.begun)
    lengths = [length for part in stopped for length in part.responses.lengths.tolist()]
    assert sum(lengths) > 0, "nothing was stopped in the middle"
    return reply
