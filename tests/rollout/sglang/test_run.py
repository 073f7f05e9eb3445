"""A run of an SGLang engine over a feed, on a host without SGLang."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, PromptBatch
from rlhf.errors import EngineError
from rlhf.rollout.feed import Load, Work
from rlhf.rollout.ledger import Ledger
from rlhf.rollout.sglang.run import SURPLUS, Run
from tests.rollout.feeds import Scripted, one_by_one
from tests.rollout.sglang.life.test_process import start
from tests.rollout.tiny import prompts

SAMPLING = SamplingConfig(max_new_tokens=6)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("host"), "samples", limit_s=20.0)
    yield made
    made.close()


def run(host, feed, *, max_running=4, progress=None, tells=None):
    """Over a feed; `tells` hears of every message to the host."""
    ledger = Ledger(SAMPLING, vocab_size=200, kv_cache_tokens=100, run_seed=1, policy_version=4, where="sglang engine")
    one = Run(
        host,
        feed,
        ledger,
        sampling=SAMPLING,
        eos_token_ids=(),
        max_running=max_running,
        version="4",
        on_progress=None if progress is None else lambda done, taken: progress.append((done, taken)),
    )
    if tells is not None:
        one._host = Told(host, tells)
    one.go()


class Told:
    """A host whose messages are noted."""

    def __init__(self, host, tells):
        self.host, self.tells = host, tells
        self.hear = host.hear

    def tell(self, verb, *arguments):
        self.tells.append((verb, *arguments))
        self.host.tell(verb, *arguments)


def counting(batch: PromptBatch) -> list[list[int]]:
    """What the fake host answers: the numbers after the prompt's last token."""
    return [list(range(int(row[-1]) + 1, int(row[-1]) + 7)) for row in batch.tokens.rows()]


@pytest.mark.parametrize("size", [1, 5, 40])
def test_rows_that_come_while_others_run_come_back_once(host, size):
    batch, progress = prompts((3,) * 40, samples=1), []
    feed = Scripted(one_by_one(batch, size=size), ready=lambda feed: feed.asked % 2 == 0)
    run(host, feed, progress=progress)
    found = feed.by_sample()
    assert [row.tolist() for row in found.responses.rows()] == counting(batch)
    assert found.rollout_logprobs.values.tolist() == [-token for token in found.responses.values.tolist()]
    assert len(feed.parts) > 3
    assert progress == sorted(progress)
    assert progress[-1] == (40, 40)


def test_what_the_host_has_at_a_time_is_bounded_and_never_less_than_it_can_run(host):
    tells = []
    feed = Scripted([Work(prompts((3,) * 40))])
    run(host, feed, tells=tells)
    sizes = [len(asks) for _, asks in tells]
    assert sizes[0] == 4 + SURPLUS
    assert sum(sizes) == 40
    assert max(sizes[1:]) <= 4 + SURPLUS
    assert feed.loads == [Load(rows=0, outstanding_tokens=0)]  # asked again, it would have had to wait


def test_stopped_rows_come_back_with_what_they_have_and_go_on(host):
    batch = prompts((3,) * 20)
    feed = Scripted([Work(batch)], stops=lambda feed: feed.num_done >= 4)
    run(host, feed)
    part = feed.by_sample()
    assert len(part) == 20
    assert set(part.responses.lengths.tolist()) == {6, 3, 0}  # ended, running, waiting here or there
    reasons = [FinishReason.LENGTH if count == 6 else FinishReason.ABORT for count in part.responses.lengths.tolist()]
    assert part.finish_reasons.tolist() == reasons
    again = Scripted([Work(part.prompts, begun=part)])
    tells = []
    run(host, again, tells=tells)
    assert [row.tolist() for row in again.by_sample().responses.rows()] == counting(batch)
    missing = sorted(ask.sampling["max_new_tokens"] for _, asks in tells for ask in asks)
    assert missing == sorted(6 - count for count in part.responses.lengths.tolist() if count < 6)


def test_samples_of_a_prompt_that_come_together_are_marked_and_no_others(host):
    batch, tells = prompts((3, 4, 5), samples=2).select(torch.tensor([0, 1, 2, 4, 5])), []
    run(host, Scripted([Work(batch)]), tells=tells)
    asked = {ask.number: ask.shares_prompt for _, asks in tells for ask in asks}
    assert [asked[number] for number in sorted(asked)] == [True, True, False, True, True]


def test_a_feed_may_stop_before_anything_or_have_nothing(host):
    run(host, Scripted([]))
    feed = Scripted(one_by_one(prompts((3, 4))), stops=lambda feed: True)
    run(host, feed)
    assert feed.parts == []
    feed = Scripted(one_by_one(prompts((3, 4))), ready=lambda feed: feed.asked > 50)
    run(host, feed)
    assert len(feed.by_sample()) == 2


def test_a_feed_that_raises_leaves_the_host_idle(host):
    def fails(feed):
        if feed.judged == 3:
            raise ZeroDivisionError
        return False

    with pytest.raises(ZeroDivisionError):
        run(host, Scripted([Work(prompts((3,) * 20))], stops=fails))
    feed = Scripted([Work(prompts((5, 6)))])
    run(host, feed)
    assert [row.tolist() for row in feed.by_sample().responses.rows()] == counting(prompts((5, 6)))


def test_a_row_that_nobody_stopped_is_no_response_when_sglang_aborts_it(host):
    batch = prompts((3,) * 20)
    batch.tokens.values[3 * 9] = 98
    with pytest.raises(EngineError, match="sample 1009 was aborted by SGLang, though nobody had asked for it"):
        run(host, Scripted([Work(batch)]))
    feed = Scripted([Work(prompts((5, 6)))])
    run(host, feed)
    assert len(feed.by_sample()) == 2


@pytest.mark.parametrize("place", [8, 11])
def test_a_row_that_is_refused_is_named_and_the_host_can_go_on(host, place):
    """Rows 8 to 11 end in one message: the first of them, and the last."""
    batch = prompts((3,) * 20)
    batch.tokens.values[3 * place] = 99
    with pytest.raises(EngineError, match=f"sample {1000 + place}: SGLang did not answer: ValueError: as asked"):
        run(host, Scripted([Work(batch)]))
    batch = prompts((3,) * 20)
    batch.tokens.values[3 * 11] = 200
    with pytest.raises(EngineError, match="sample 1011 has prompt token 200"):
        run(host, Scripted(one_by_one(batch)))
    feed = Scripted([Work(prompts((5, 6)).select(torch.tensor([1])))])
    run(host, feed)
    assert len(feed.by_sample()) == 1
