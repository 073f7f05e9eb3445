"""An engine on SGLang against transformers, and its dealings with the caller. One engine for the whole file."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, Provenance
from rlhf.errors import EngineError
from rlhf.rollout.feed import Work
from rlhf.rollout.performance import PerformanceMonitor
from tests.rollout.feeds import Scripted, assert_same, one_by_one
from tests.rollout.sglang.errands import Fails, Shapes, Storages
from tests.rollout.sglang.listeners import check_private
from tests.rollout.sglang.tiny import load, make_engine, needs_sglang
from tests.rollout.test_native_engine import greedy_reference
from tests.rollout.tiny import hf_model, prompts, reference_logprobs
from tests.rollout.tiny import make_engine as make_native_engine

pytestmark = needs_sglang

GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=13)
EOS = 17
SAMPLED = SamplingConfig(temperature=0.9, top_k=60, max_new_tokens=13)
GREEDY_LONG = SamplingConfig(temperature=0.0, max_new_tokens=200, ignore_eos=True)
SAMPLED_LONG = SamplingConfig(temperature=0.9, max_new_tokens=200, ignore_eos=True)
MODEL = "qwen3"
ALIGNED = {"intermediate_size": 96}
"""On CPUs SGLang pads MLPs to a multiple of 32 a rank, which our layout does not describe."""
CLOSE = {"atol": 3e-5, "rtol": 0}
"""fp32 sums in another order."""


@pytest.fixture(scope="module")
def model():
    return hf_model(MODEL, **ALIGNED)


@pytest.fixture(scope="module")
def progress():
    return []


@pytest.fixture(scope="module")
def engine(model, progress, tmp_path_factory):
    """Started from random weights; it refuses to answer by them. Then it gets the model's, as version 5."""
    folder = tmp_path_factory.mktemp("engine")
    made = make_engine(
        model,
        folder / "logs",
        eos_token_ids=(EOS,),
        max_running=5,
        on_progress=lambda done, total: progress.append((done, total)),
        performance=PerformanceMonitor(),
    )
    try:
        with pytest.raises(EngineError, match="no weights yet"):
            made.generate(prompts((3,)), GREEDY)
        load(made, model, folder / "model", version=5)
        assert made.collect().policy_versions.values.eq(5).all()  # what was queued is answered now
        yield made
    finally:
        made.close()


def check_logprobs(model, rollout, temperature=1.0):
    rows = zip(rollout.prompts.tokens.rows(), rollout.responses.rows(), rollout.rollout_logprobs.rows(), strict=True)
    for prompt, response, logprobs in rows:
        torch.testing.assert_close(logprobs, reference_logprobs(model, prompt, response, temperature), **CLOSE)


def test_greedy_tokens_and_logprobs_equal_transformers(engine, model):
    batch = prompts(samples=2)
    rollout = engine.generate(batch, GREEDY)
    for prompt, response, reason in zip(
        batch.tokens.rows(), rollout.responses.rows(), rollout.finish_reasons.tolist(), strict=True
    ):
        wanted = greedy_reference(model, prompt, 13, eos=EOS).tolist()
        assert response.tolist() == wanted
        assert reason == (FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH)
    check_logprobs(model, rollout)
    assert rollout.prompts.sample_ids.tolist() == batch.sample_ids.tolist()
    assert rollout.provenance.values.eq(Provenance.SAMPLED).all()
    assert rollout.policy_versions.values.eq(5).all()


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8, "top_k": 9}])
def test_sampled_logprobs_are_those_of_the_tempered_distribution_before_any_cut(engine, model, cut):
    rollout = engine.generate(prompts(samples=3), SamplingConfig(temperature=0.7, max_new_tokens=11, **cut))
    check_logprobs(model, rollout, 0.7)
    if cut:
        for prompt, response in zip(rollout.prompts.tokens.rows(), rollout.responses.rows(), strict=True):
            with torch.no_grad():
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            ranks = (logits > logits.gather(1, response[:, None])).sum(1)
            assert bool((ranks < 9).all())  # top_k is obeyed; which log-prob it has is another matter


def test_samples_of_one_prompt_differ_and_submissions_are_collected_in_their_order(engine, model):
    batch = prompts((6,), samples=8)
    engine.submit(batch, SamplingConfig(temperature=1.0, max_new_tokens=12, ignore_eos=True))
    engine.submit(batch, GREEDY)
    rollout = engine.collect()
    sampled = {tuple(row.tolist()) for row in rollout.responses.rows()[:8]}
    greedy = {tuple(row.tolist()) for row in rollout.responses.rows()[8:]}
    assert len(sampled) > 4
    assert len(greedy) == 1
    check_logprobs(model, rollout)


def test_a_samples_tokens_are_those_of_its_seed_in_any_batch_and_in_the_embedded_engine(engine, model):
    batch, sampling = prompts((6, 2, 19), samples=4), SamplingConfig(temperature=1.1, max_new_tokens=12)
    first = engine.generate(batch, sampling)
    assert torch.equal(engine.generate(batch, sampling).responses.values, first.responses.values)
    few = torch.tensor([7, 1, 10])
    assert_same_rows(engine.generate(batch.select(few), sampling), first.select(few))
    assert_same_rows(make_native_engine(model, eos_token_ids=(EOS,)).generate(batch, sampling), first)
    assert not torch.equal(engine.generate(batch, sampling, attempt=1).responses.values, first.responses.values)


def assert_same_rows(found, wanted):
    assert [row.tolist() for row in found.responses.rows()] == [row.tolist() for row in wanted.responses.rows()]
    torch.testing.assert_close(found.rollout_logprobs.values, wanted.rollout_logprobs.values, **CLOSE)


def test_stop_tokens_of_model_and_of_sampling_end_a_response_and_belong_to_it(engine, model):
    batch = prompts()
    free = [greedy_reference(model, prompt, 13).tolist() for prompt in batch.tokens.rows()]
    stop = free[2][7]
    rollout = engine.generate(batch, SamplingConfig(temperature=0.0, max_new_tokens=13, stop_token_ids=(stop,)))
    for row, response, reason in zip(free, rollout.responses.rows(), rollout.finish_reasons.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in (EOS, stop)]
        assert response.tolist() == (row[: ends[0] + 1] if ends else row)
        assert reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert FinishReason.STOP in rollout.finish_reasons
    rollout = engine.generate(batch, SamplingConfig(temperature=0.0, max_new_tokens=13, ignore_eos=True))
    assert [response.tolist() for response in rollout.responses.rows()] == free


def test_a_prompt_of_all_the_room_gets_its_whole_response(engine):
    longest = engine._spec.max_positions - 13
    rollout = engine.generate(prompts((longest,)), SamplingConfig(temperature=0.0, max_new_tokens=13, ignore_eos=True))
    assert rollout.responses.lengths.tolist() == [13]


def test_what_cannot_be_answered_is_refused_by_sample_and_nothing_is_queued(engine):
    with pytest.raises(EngineError, match="sample 1001 has an empty prompt"):
        engine.submit(prompts((3, 0)), GREEDY)
    with pytest.raises(EngineError, match="sample 1000 needs 4090 prompt tokens"):
        engine.submit(prompts((4090,)), GREEDY)
    batch = prompts((3, 4))
    batch.tokens.values[5] = 131  # a padding row of the embedding
    with pytest.raises(EngineError, match=r"sample 1001 has prompt token 131; the model has 0\.\.130"):
        engine.submit(batch, GREEDY)
    with pytest.raises(EngineError, match="nothing was submitted"):
        engine.collect()
    assert len(engine.generate(prompts().select(torch.arange(0)), GREEDY)) == 0


def test_progress_rises_to_the_number_of_rows(engine, progress):
    progress.clear()
    engine.generate(prompts(), GREEDY)
    assert progress[-1] == (6, 6)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_rows_are_timed_by_sglang_and_found_prefixes_are_counted(engine):
    monitor, batch = engine._performance, prompts((60,), samples=10, seed=99)
    with monitor.measuring():
        engine.generate(batch, GREEDY)
    seen = monitor.window()
    assert len(seen.latency_s) == 10
    assert (seen.queue_s <= seen.first_token_s).all()
    assert (seen.first_token_s < seen.latency_s).all()
    assert sorted(seen.latency_s)[-1] <= seen.seconds
    assert sorted(seen.queue_s)[-1] > sorted(seen.first_token_s)[0]  # 5 run at a time, so the last ones wait for others
    assert 0 < seen.decode_s < seen.busy_s <= seen.seconds
    assert seen.response_tokens >= 10
    assert seen.cached_tokens == 9 * 59  # the first one computes the prompt, each its last token


def test_an_asleep_engine_refuses_and_wakes_with_the_same_answers(engine):
    before = engine.generate(prompts(), GREEDY)
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.generate(prompts(), GREEDY)
    engine.wake()
    assert torch.equal(engine.collect().responses.values, before.responses.values)


def test_nobody_else_reaches_its_processes(engine):
    check_private(engine.host_pid, engine._folder)


def test_weights_and_cache_are_given_back_and_answers_are_the_same_once_all_weights_have_come(engine, model, tmp_path):
    before = engine.generate(prompts(), GREEDY)
    (full,) = engine.ask_schedulers(Storages())
    assert engine.sleep(weights=True) > 0
    assert engine.ask_schedulers(Storages()) == [(0, full[1])]  # rotary tables stay
    engine.wake_weights()
    engine.wake()
    assert engine.ask_schedulers(Storages()) == [full]
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(prompts(), GREEDY)
    load(engine, model, tmp_path, version=5)
    assert torch.equal(engine.collect().responses.values, before.responses.values)


def test_memory_is_not_given_back_while_rows_run(engine):
    def sleeps(feed: Scripted) -> bool:
        with pytest.raises(EngineError, match="rows are running"):
            engine.sleep()
        return feed.judged > 5

    engine.run(Scripted([Work(prompts())], stops=sleeps), GREEDY_LONG)
    assert len(engine.generate(prompts(), GREEDY)) == 6


def test_schedulers_tell_their_parameters_and_an_errand_that_fails_is_named(engine):
    (shapes,) = engine.ask_schedulers(Shapes())
    assert shapes["model.layers.1.self_attn.qkv_proj.weight"] == ((4 + 2 + 2) * 16, 44)
    with pytest.raises(EngineError, match=r"tp rank 0: ValueError: no such window"):
        engine.ask_schedulers(Fails())


def test_rows_that_come_while_others_run_come_back_once_and_as_if_alone(engine):
    batch = prompts(samples=3)
    wanted = engine.generate(batch, SAMPLED)
    for size, ready in ((1, lambda feed: feed.asked % 2 == 0), (4, lambda feed: feed.num_done >= len(feed.parts) - 1)):
        feed = Scripted(one_by_one(batch, size=size), ready=ready)
        engine.run(feed, SAMPLED)
        assert_same(feed.by_sample(), wanted, atol=1e-4)  # the batch's size decides over the last bits
        assert len(feed.parts) > 2


@pytest.mark.parametrize("sampling", [GREEDY_LONG, SAMPLED_LONG], ids=["greedy", "sampled"])
def test_stopped_rows_come_back_with_what_they_have_and_go_on_as_if_uninterrupted(engine, sampling):
    """More rows than run at a time, some of which SGLang has waiting, and some have not reached it."""
    batch = prompts(samples=3)
    wanted = engine.generate(batch, sampling)
    feed = Scripted([Work(batch)], stops=lambda feed: feed.judged > 12)
    engine.run(feed, sampling)
    part = feed.by_sample()
    assert len(part) == len(batch)
    lengths, reasons = part.responses.lengths, part.finish_reasons
    assert bool(((lengths == 200) == (reasons == FinishReason.LENGTH)).all())
    assert 0 in lengths
    assert bool(((lengths > 0) & (reasons == FinishReason.ABORT)).any())
    for row, whole in zip(part.responses.rows(), wanted.responses.rows(), strict=True):
        assert row.tolist() == whole[: len(row)].tolist()
    again = Scripted([Work(part.prompts, begun=part)])
    engine.run(again, sampling)
    assert_same(again.by_sample(), wanted, atol=1e-4)


def test_samples_of_a_prompt_share_what_was_computed_for_it(engine):
    monitor, batch = engine._performance, prompts((65, 40, 33, 2), samples=8, seed=77)  # new to the cache
    with monitor.measuring():
        engine.generate(batch, GREEDY)
    assert monitor.window().cached_tokens == 7 * (64 + 39 + 32 + 1)  # all but each prompt's last


def test_a_feed_that_raises_leaves_an_engine_that_answers(engine):
    batch = prompts(samples=2)
    wanted = engine.generate(batch, GREEDY)

    def fails(feed):
        if feed.judged == 3:
            raise ZeroDivisionError
        return False

    with pytest.raises(ZeroDivisionError):
        engine.run(Scripted([Work(batch)], stops=fails), GREEDY)
    assert_same(engine.generate(batch, GREEDY), wanted, atol=1e-4)


def test_rows_of_old_weights_go_on_with_new_ones(engine, model, tmp_path):
    batch = prompts((70, 71))
    feed = Scripted([Work(batch)], stops=lambda feed: feed.judged > 5)
    engine.run(feed, GREEDY_LONG)
    old = feed.by_sample()
    load(engine, model, tmp_path, version=15)
    feed = Scripted([Work(batch, begun=old)])
    engine.run(feed, GREEDY_LONG)
    new = feed.by_sample()
    counts = zip(old.responses.lengths.tolist(), new.policy_versions.rows(), strict=True)
    assert all(versions.tolist() == [5] * count + [15] * (200 - count) for count, versions in counts)
    check_logprobs(model, new)
    load(engine, model, tmp_path, version=5)


def test_new_weights_are_used_at_once_and_old_keys_and_values_are_not(engine, model, tmp_path):
    batch = prompts((70, 71))
    before = engine.generate(batch, GREEDY)  # their prefixes are cached now
    other = hf_model(MODEL, **ALIGNED)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    load(engine, other, tmp_path, version=6)
    after = engine.generate(batch, GREEDY)
    assert after.policy_versions.values.eq(6).all()
    assert not torch.equal(before.responses.values, after.responses.values)
    check_logprobs(other, after)
    load(engine, model, tmp_path, version=7)
    check_logprobs(model, engine.generate(batch, GREEDY))


def test_after_an_update_that_failed_the_engine_answers_nothing_until_the_next(engine, model, tmp_path):
    engine._entrance.port.begin_update()
    with pytest.raises(EngineError, match=r"tp rank 0: ValueError: no such window"):
        engine._entrance.port.load_window([Fails()])
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(prompts((3,)), GREEDY)
    load(engine, model, tmp_path, version=8)
    check_logprobs(model, engine.collect())


def test_a_scheduler_that_dies_ends_the_engine_which_says_so_and_leaves_nothing(engine):
    """The last test: it ends the file's engine."""
    host = psutil.Process(engine.host_pid)
    tree = [host, *host.children(recursive=True)]
    mapped = {one.path for process in tree for one in process.memory_maps() if one.path.startswith("/dev/shm")}
    scheduler = next(process for process in tree if "scheduler" in " ".join(process.cmdline()))
    os.kill(scheduler.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"engine_0: scheduler tp 0 \(pid {scheduler.pid}\) was ended by SIGKILL"):
        engine.ask_schedulers(Shapes())
    engine.close()
    assert psutil.wait_procs(tree, timeout=10)[1] == []
    assert not list(Path(tempfile.gettempdir()).glob(f"rlhf_{os.getpid()}_engine_*"))
    assert not [path for path in mapped if Path(path).exists()]
