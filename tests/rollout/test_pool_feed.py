"""Feeds over one store: each row is answered once whatever the timing, and engines end at about the same time."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.batch import FinishReason
from rlhf.rollout.answers import Answers
from rlhf.rollout.pool_feed import PoolFeed, Question
from tests.rollout.simulated import Clock, SimulatedEngine, asked_rows, pool_of, run_side_by_side


def question_of(prompt_lengths, samples, *, keep=None, begun=None, expected=60) -> Question:
    return Question.of(
        asked_rows(prompt_lengths, samples),
        Answers.empty() if begun is None else begun,
        keep=keep,
        attempt=0,
        expected_tokens=expected,
        max_new_tokens=1000,
    )


def simulate(question, lengths, *, num_engines=4, slots=8, batching="dynamic", starts=(), kv=10**9, **more):
    """Feeds and engines after a run on one clock. `claimed_kv`: what feeds think that engines hold, if not `kv`."""
    clock = Clock()
    feeds = pool_of(
        question, num_engines, slots=slots, batching=batching, clock=clock, kv_tokens=more.pop("claimed_kv", kv)
    )
    engines = [SimulatedEngine(feed, lengths, slots, kv, **more) for feed in feeds]
    run_side_by_side(engines, clock, starts=starts)
    return feeds, engines


# Response lengths: a tail over two decades; one in ten fifty times as long as the rest; Pareto's; alike in a prompt.
MIXES = {
    "lognormal": lambda random, prompt: min(512, 1 + int(random.lognormvariate(3.5, 1.0))),
    "two lengths": lambda random, prompt: random.choice([8] * 9 + [400]),
    "pareto": lambda random, prompt: min(600, int(10 * random.paretovariate(1.1))),
    "by prompt": lambda random, prompt: int(
        min(400, Random(prompt).lognormvariate(3.5, 1.2)) * random.uniform(0.7, 1.3) + 1
    ),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(5))
def test_four_engines_are_busy_for_the_same_time_within_a_tenth_on_skewed_lengths(mix, seed):
    """Longest over mean busy time, in decode steps and prefill; the mean is at least 6 times the longest response."""
    random = Random(seed)
    prompt_lengths = [random.randint(1, 90) for _ in range(800)]
    lengths = {row: MIXES[mix](random, row // 2) for row in range(1600)}
    feeds, engines = simulate(question_of(prompt_lengths, 2), lengths, slots=5)
    busy = [engine.busy for engine in engines]
    assert max(busy) / (sum(busy) / 4) <= 1.1
    assert sum(len(feed.answers()) for feed in feeds) == 1600


@pytest.mark.parametrize("mix", MIXES)
def test_engines_whose_memory_holds_few_long_rows_are_even_too_for_they_claim_no_more_than_it_holds(mix):
    """Room for about 4 of 300 rows beside slots for 80, in two runs; by slots alone an engine claims all its queue."""
    spreads = {}
    for claimed_kv in (10_000, 10**9):
        for seed in range(2):
            random = Random(seed)
            prompt_lengths = [random.randint(1800, 3000) for _ in range(300)]
            lengths = {row: min(60, MIXES[mix](random, row)) for row in range(300)}
            _, engines = simulate(
                question_of(prompt_lengths, 1),
                lengths,
                slots=80,
                kv=10_000,
                claimed_kv=claimed_kv,
                prefill_speed=3000,
            )
            busy = [engine.busy for engine in engines]
            spreads.setdefault(claimed_kv, []).append(max(busy) / (sum(busy) / 4))
    assert max(spreads[10_000]) <= 1.1
    assert sum(spreads[10_000]) < sum(spreads[10**9]) - 2 * 0.03


@pytest.mark.parametrize("expected", [60, 500])
def test_an_engine_takes_short_rows_up_to_its_slots_and_long_ones_up_to_its_memory(expected):
    """Whatever the first guess at the responses' lengths: what was seen counts soon."""
    for prompt_tokens, most in ((10, 16), (3000, 4)):
        question = question_of([prompt_tokens] * 60, 1, expected=expected)
        clock = Clock()
        feed, _ = pool_of(question, 2, slots=16, kv_tokens=12_000, clock=clock)
        engine = SimulatedEngine(feed, dict.fromkeys(range(60), 20), 16, 12_000)
        taken = []
        while not engine.over:
            clock.steps += 1
            engine.round()
            taken.append(len(engine.running) + len(engine.waiting))
        assert max(taken) == most
        assert sum(len(part) for part in feed._ended) == 60


def test_an_engine_that_starts_late_is_spared_and_one_that_starts_early_does_not_take_all():
    lengths = dict.fromkeys(range(64), 20)
    _, engines = simulate(question_of([5] * 16, 4), lengths, slots=64, starts=[0, 3, 3, 3])
    assert [engine.busy > 0 for engine in engines] == [True] * 4  # all had room for all of them
    _, engines = simulate(question_of([5] * 64, 4), dict.fromkeys(range(256), 20), slots=4, starts=[0, 0, 0, 200])
    assert max(engine.busy for engine in engines[:3]) >= 1.3 * engines[3].busy > 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["dynamic", "buckets"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_each_row_is_answered_once_whatever_the_timing_and_whoever_is_lost(
    prompt_lengths, samples, num_engines, batching, loses, keeps_all, random
):
    """Engines take turns at random; some are lost on the way, but never the last one."""
    num_groups = len(prompt_lengths)
    keep = None if keeps_all else random.randint(1, num_groups)
    question = question_of(prompt_lengths, samples, keep=keep)
    lengths = {row: random.randint(1, 9) for row in range(num_groups * samples)}
    clock = Clock(step_s=1.0)
    feeds = pool_of(question, num_engines, slots=3, batching=batching, clock=clock, edges=(8, 20))
    engines = [SimulatedEngine(feed, lengths, 3) for feed in feeds]
    alive, turns = set(range(num_engines)), 0
    while any(not engines[n].over for n in alive):
        number = random.choice(sorted(n for n in alive if not engines[n].over))
        clock.steps += 1
        engines[number].round()
        turns += 1
        if turns in loses and len(alive) > 1 and not engines[number].over:
            feeds[number].give_back()
            alive.discard(number)
        assert turns < 5000
    whole = [at for feed in feeds for at in feed.place]
    assert len(whole) == len(set(whole)) >= question.keep
    assert sorted(place for feed in feeds for place in feed.place.values()) == list(range(1, len(whole) + 1))
    found = Answers.concat([feed.answers() for feed in feeds])
    ids = found.sample_ids.tolist()
    assert len(ids) == len(set(ids))
    for at, sample_id in enumerate(ids):
        response = found.responses.rows()[at]
        assert response.tolist() == [sample_id * 1000 + i for i in range(len(response))]
        ended = found.finish_reasons[at] != FinishReason.ABORT
        assert len(response) == lengths[sample_id] if ended else len(response) <= lengths[sample_id]
    if keeps_all:
        assert sorted(ids) == list(range(num_groups * samples))


def test_a_batch_is_taken_by_an_engine_that_has_nothing_to_do_and_no_row_joins_it():
    question = question_of([5, 30, 6, 31, 7, 32, 8, 33], 2)
    lengths = {row: 1 + row for row in range(16)}
    clock = Clock()
    (feed,) = pool_of(question, 1, slots=4, batching="buckets", clock=clock, edges=(16,))
    engine = SimulatedEngine(feed, lengths, 4)
    seen = []
    while not engine.over:
        clock.steps += 1
        engine.round()
        seen.append(frozenset(row.work.prompts.tokens.lengths[row.place].item() for row in engine.running))
    batches = [{32, 33}, {30, 31}, {7, 8}, {5, 6}]
    assert [{n for one in seen for n in one if one <= batch} for batch in batches] == batches
    assert all(any(one <= batch for batch in batches) for one in seen)
    # rows of prompt 1 (30 tokens) and 3 (31): responses 3, 4, 7, 8; slots of 31 + 8 tokens, and so on
    used = sum(2 * length for length in (5, 30, 6, 31, 7, 32, 8, 33)) + sum(lengths.values())
    padded = 4 * (33 + 16 + 31 + 8 + 8 + 14 + 6 + 6)
    assert feed.slot_tokens() == (padded, used)


def test_the_first_groups_are_kept_and_the_others_come_back_as_far_as_they_came():
    question = question_of([5] * 6, 2, keep=4)
    lengths = {row: 4 if row < 8 else 100 for row in range(12)}
    feeds, _ = simulate(question, lengths, num_engines=2, slots=6)
    places = {at: place for feed in feeds for at, place in feed.place.items()}
    assert sorted(places) == [0, 1, 2, 3]
    found = Answers.concat([feed.answers() for feed in feeds]).ordered_as(torch.arange(12))
    assert found.finish_reasons.tolist() == [FinishReason.STOP] * 8 + [FinishReason.ABORT] * 4
    assert all(0 < count < 100 for count in found.responses.lengths[8:].tolist())


def test_rows_that_were_begun_go_on_first_and_whole_ones_are_not_asked_again():
    first = question_of([5] * 6, 2, keep=4)
    lengths = {row: 4 if row < 8 else 40 + row for row in range(12)} | {8: 2}
    feeds, _ = simulate(first, lengths, num_engines=2, slots=6)
    found = Answers.concat([feed.answers() for feed in feeds])
    left = found.select((found.prompt_ids >= 4).nonzero().flatten())
    then = question_of([5] * 6, 2, begun=left)
    assert [then.groups[at].tokens for at in range(4)] == [5 + 2 * 60] * 4
    assert then.groups[5].tokens > 5 + 2 * 60
    work = then.work([4, 0])
    assert work.begun is not None
    assert work.begun.finish_reasons.tolist() == [FinishReason.STOP, *[FinishReason.ABORT] * 3]
    assert work.begun.responses.lengths.tolist()[2:] == [0, 0]
    feeds, engines = simulate(then, lengths, num_engines=2, slots=6)
    whole = Answers.concat([feed.answers() for feed in feeds]).ordered_as(torch.arange(12))
    assert whole.responses.lengths.tolist() == [lengths[row] for row in range(12)]
    assert all(isinstance(engine.feed, PoolFeed) for engine in engines)
