"""Rows fed to the native engine while it runs: exactly once, stopped, continued; on one rank and on two."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, Provenance, Rollout
from rlhf.dist.groups import GroupFactory
from rlhf.errors import EngineError
from rlhf.rollout.feed import Work
from rlhf.rollout.ledger import Ledger
from rlhf.rollout.native.intake import Intake
from rlhf.rollout.performance import PerformanceMonitor
from tests.harness.ranks import run_ranks
from tests.rollout.feeds import Scripted, assert_same, one_by_one
from tests.rollout.tiny import fill, hf_model, make_engine, prompts

SAMPLED = SamplingConfig(temperature=0.9, top_k=60, max_new_tokens=23)
EOS = (3, 17, 40)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def every(times):
    """Ready at each of so many calls."""
    return lambda feed: feed.asked % times == 0


@pytest.mark.parametrize("times", [1, 3, 30])
@pytest.mark.parametrize("max_running", [1, 3, 64])
def test_rows_that_come_while_others_run_come_back_once_and_as_if_alone(times, max_running):
    engine, batch = make_engine(hf_model("qwen3"), max_running=max_running, eos_token_ids=EOS), prompts(samples=2)
    wanted = engine.generate(batch, SAMPLED)
    feed = Scripted(one_by_one(batch), ready=every(times))
    engine.run(feed, SAMPLED)
    assert_same(feed.by_sample(), wanted)
    assert len(feed.parts) >= 3  # not all at the end


@pytest.mark.parametrize("lengths", [(3, 9, 30, 61, 90, 4), (90, 3, 3, 3, 3, 3, 61), (5, 90, 5, 90, 5)])
def test_slots_grow_and_shrink_around_rows_that_run(lengths):
    """Room for 128 tokens: one row of 90 + 23, or five of 3 + 23."""
    model, batch = hf_model("llama"), prompts(lengths)
    wanted = make_engine(model, eos_token_ids=EOS).generate(batch, SAMPLED)
    engine = make_engine(model, eos_token_ids=EOS, kv_cache_tokens=128, max_running=8, sampling=SAMPLED)
    feed = Scripted(one_by_one(batch), ready=every(4))
    engine.run(feed, SAMPLED)
    assert_same(feed.by_sample(), wanted)
    assert_same(engine.generate(batch, SAMPLED), wanted)


def interrupted(engine, batch, sampling, *, after, size=2):
    """What comes back of rows that are stopped after so many rounds."""
    feed = Scripted(one_by_one(batch, size=size), stops=lambda feed: feed.judged > after)
    engine.run(feed, sampling)
    return feed


@pytest.mark.parametrize("after", [0, 1, 2, 9, 20])
def test_stopped_rows_come_back_with_what_they_have_and_go_on_to_the_bit_as_if_uninterrupted(after):
    engine, batch = make_engine(hf_model("qwen3"), max_running=5, eos_token_ids=EOS), prompts(samples=2)
    wanted = engine.generate(batch, SAMPLED)
    feed = interrupted(engine, batch, SAMPLED, after=after)
    part, never = feed.by_sample(), sum(len(work.prompts) for work in feed.works)
    assert len(part) == len(batch) - never
    for row, whole, reason in zip(
        part.responses.rows(), wanted.responses.rows(), part.finish_reasons.tolist(), strict=False
    ):
        assert whole[: len(row)].tolist() == row.tolist()
        assert (len(row) < len(whole)) == (reason == FinishReason.ABORT)
    again = Scripted([Work(part.prompts, begun=part), *feed.works], ready=every(2))
    engine.run(again, SAMPLED)
    assert_same(again.by_sample(), wanted)


def test_a_long_response_goes_on_to_the_bit_beside_fresh_rows_of_its_prompt():
    """More tokens than one replay takes; the prompt's keys and values are copied from a row that runs."""
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=400, ignore_eos=True)
    engine, batch = make_engine(hf_model("llama"), max_running=5), prompts((33, 1), samples=2)
    wanted = engine.generate(batch, sampling)
    cut = interrupted(engine, batch.select(torch.tensor([1, 3])), sampling, after=300, size=2).by_sample()
    assert cut.responses.lengths.tolist() == [300, 300]
    fresh = Work(batch.select(torch.tensor([0, 2])))
    feed = Scripted([fresh, Work(cut.prompts, begun=cut)], ready=every(50))
    engine.run(feed, sampling)
    assert_same(feed.by_sample(), wanted)


def test_new_weights_go_on_with_old_tokens_that_keep_their_logprobs_and_versions():
    model, batch = hf_model("llama"), prompts((7, 12))
    engine = make_engine(model)
    engine.weights_updated(4)
    old = interrupted(engine, batch, SAMPLED, after=9).by_sample()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    fill(engine.params(), engine.layout(), 0, model.state_dict())
    engine.weights_updated(5)
    feed = Scripted([Work(batch, begun=old)])
    engine.run(feed, SAMPLED)
    new = feed.by_sample()
    assert new.policy_versions.values.tolist() == ([4] * 9 + [5] * 14) * 2
    for field in ("responses", "rollout_logprobs"):
        for whole, begun in zip(getattr(new, field).rows(), getattr(old, field).rows(), strict=True):
            assert torch.equal(whole[:9], begun)
    for prompt, response, logprobs in zip(
        batch.tokens.rows(), new.responses.rows(), new.rollout_logprobs.rows(), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.9
        wanted = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs[9:], wanted[9:], atol=3e-5, rtol=0)  # fp32 sums in another order


def test_rows_that_came_complete_go_back_as_they_are():
    engine, batch = make_engine(hf_model("llama"), eos_token_ids=EOS), prompts()
    whole = engine.generate(batch, SAMPLED)
    feed = Scripted([Work(batch, begun=whole)])
    engine.run(feed, SAMPLED)
    assert_same(feed.by_sample(), whole)
    part = interrupted(engine, batch, SAMPLED, after=8).by_sample()
    shorter = SamplingConfig(temperature=0.9, top_k=60, max_new_tokens=8)
    feed = Scripted([Work(batch, begun=part)])
    engine.run(feed, shorter)
    assert_same(feed.by_sample(), engine.generate(batch, shorter))
    tool = Rollout.unanswered(batch)
    feed = Scripted([Work(batch, begun=tool)])
    engine.run(feed, shorter)
    assert [row.tolist()[0] for row in feed.by_sample().provenance.rows()] == [Provenance.TEMPLATE] * 6


def test_the_load_is_what_may_yet_be_sampled():
    engine, batch = make_engine(hf_model("llama"), max_running=4), prompts((5, 6, 7))
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=10, ignore_eos=True)
    feed = Scripted(one_by_one(batch), ready=every(5))
    engine.run(feed, sampling)
    assert [(load.rows, load.outstanding_tokens) for load in feed.loads if load.rows] == [
        *[(1, 10 - step) for step in range(5)],
        *[(2, 6 + 10 - 2 * step) for step in range(5)],
        (3, 8 + 10),
    ]


def test_the_monitor_hears_of_rows_and_of_what_they_share():
    monitor = PerformanceMonitor()
    engine, batch = make_engine(hf_model("llama"), max_running=4, performance=monitor), prompts((60, 7), samples=5)
    with monitor.measuring():
        engine.generate(batch, SAMPLED)
    seen = monitor.window()
    assert len(seen.latency_s) == 10
    assert (seen.queue_s >= 0).all()
    assert (seen.queue_s < seen.first_token_s).all()
    assert (seen.first_token_s < seen.latency_s).all()
    assert seen.cached_tokens == 3 * 59 + (2 + 1) * 6  # waves of 4: AAAA, ABBB, BB
    assert seen.response_tokens == 10 * 23
    interrupted(engine, batch, SAMPLED, after=5)
    assert monitor.running == monitor.waiting == 0
    with pytest.raises(ZeroDivisionError):
        engine.run(Scripted(one_by_one(batch), stops=lambda feed: 1 / (5 - feed.judged) < 0), SAMPLED)
    assert monitor.running == monitor.waiting == 0


def test_a_feed_may_give_nothing_for_a_while():
    engine, batch = make_engine(hf_model("llama")), prompts((5, 6, 7))
    feed = Scripted(one_by_one(batch), ready=lambda feed: feed.num_done == 3 - len(feed.works) and feed.asked % 20 == 0)
    engine.run(feed, SAMPLED)
    assert_same(feed.by_sample(), engine.generate(batch, SAMPLED))
    engine.run(Scripted([]), SAMPLED)


def test_a_feed_that_raises_ends_the_run_and_not_the_engine():
    engine, batch = make_engine(hf_model("llama")), prompts((5, 6, 7))
    wanted = engine.generate(batch, SAMPLED)

    def fails(feed):
        if feed.judged == 4:
            raise ValueError("no more prompts")
        return True

    with pytest.raises(ValueError, match="no more prompts"):
        engine.run(Scripted(one_by_one(batch), stops=lambda feed: fails(feed) and False), SAMPLED)
    assert_same(engine.generate(batch, SAMPLED), wanted)


def test_a_row_that_cannot_be_answered_is_named_while_others_run():
    engine = make_engine(hf_model("llama"), kv_cache_tokens=64, sampling=SAMPLED)
    batch = prompts((5, 0, 42))
    for bad, named in ((1, "sample 1001 has an empty prompt"), (2, "sample 1002 needs 42 prompt tokens")):
        works = [Work(batch.select(torch.tensor([at]))) for at in (0, bad)]
        with pytest.raises(EngineError, match=named):
            engine.run(Scripted(works, ready=every(3)), SAMPLED)
    begun = Rollout.unanswered(prompts((5,)))
    begun.responses.values[0] = 131
    with pytest.raises(EngineError, match=r"begun: sample 1000 has .*token 131"):
        engine.run(Scripted([Work(begun.prompts, begun=begun)]), SAMPLED)
    with pytest.raises(EngineError, match="responses begun for samples"):
        Work(prompts((5, 6)), begun=begun)
    assert len(engine.generate(prompts((5,)), SAMPLED)) == 1


def test_a_sample_submitted_twice_is_answered_for_each_attempt():
    engine, batch = make_engine(hf_model("llama")), prompts((5, 6))
    first, second = (engine.generate(batch, SAMPLED, attempt=attempt) for attempt in (0, 1))
    for attempt in (0, 1):
        engine.submit(batch, SAMPLED, attempt=attempt)
    assert_same(engine.collect(), Rollout.concat([first, second]))


class Said:
    """Peers of two ranks, one after the other: what the leader says, the other one hears."""

    size = 2

    def __init__(self, said: list[torch.Tensor], *, is_leader: bool) -> None:
        self.said, self.is_leader = said, is_leader

    def share(self, numbers: torch.Tensor) -> torch.Tensor:
        if not self.is_leader:
            return self.said.pop(0)
        self.said.append(numbers.clone())
        return numbers


@pytest.mark.parametrize("fails", [False, True])
def test_a_feed_that_raises_as_it_gets_stopped_rows_back_ends_the_run_on_all_ranks(fails):
    ledger = Ledger(SAMPLED, vocab_size=131, kv_cache_tokens=100, run_seed=1, policy_version=0, where="native engine")
    ledger.take(Work(prompts((5, 6))))
    said, feed = list[torch.Tensor](), Scripted([])
    if fails:
        feed.done = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        Intake(Said(said, is_leader=True), feed, ledger, None).abort([])
    with pytest.raises(EngineError, match="division by zero") if fails else nullcontext():
        Intake(Said(said, is_leader=False), None, None, None).abort([])
    assert said == []
    assert fails or feed.by_sample().finish_reasons.tolist() == [FinishReason.ABORT] * 2


def check_two_ranks() -> None:
    torch.set_num_threads(1)
    leads = dist.get_rank() == 0
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    groups = factory.device_group([(0, 1)]), factory.cpu_group([(0, 1)])
    model, batch = hf_model("qwen3"), prompts(samples=2)
    rank = dist.get_rank()
    engine = make_engine(model, rank=rank, groups=groups, tp=2, max_running=4, eos_token_ids=EOS, kv_cache_tokens=512)
    wanted = engine.generate(batch if leads else None, SAMPLED)

    def run(*args, **kwargs):
        feed = Scripted(*args, **kwargs) if leads else None
        engine.run(feed, SAMPLED)
        return feed

    works = one_by_one(batch, size=2) if leads else []
    fed = run(works, ready=every(4))
    stopped = run(works, stops=lambda feed: feed.judged > 8)
    begun = stopped.by_sample() if leads else None
    again = run([Work(begun.prompts, begun=begun), *stopped.works]) if leads else run()
    if leads:
        assert_same(fed.by_sample(), wanted)
        assert FinishReason.ABORT in begun.finish_reasons
        assert_same(again.by_sample(), wanted)
    idle = run(works, ready=lambda feed: feed.asked > 500)  # longer than the others are left without a word
    with pytest.raises(EngineError, match="sample 1001 has an empty prompt"):
        run([Work(prompts((5, 0)))], ready=every(2))
    with pytest.raises(ZeroDivisionError if leads else EngineError, match="division by zero"):
        run(works, stops=lambda feed: 1 / (5 - feed.judged) < 0)
    last = engine.generate(batch if leads else None, SAMPLED)
    if leads:
        assert_same(idle.by_sample(), wanted)
        assert_same(last, wanted)


@pytest.mark.dist
def test_an_engine_of_two_ranks_is_fed_by_its_leader():
    run_ranks(2, check_two_ranks)
