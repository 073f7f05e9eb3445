"""The feed of fixed rows, and what a work must be."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import Rollout
from rlhf.errors import EngineError
from rlhf.rollout.feed import FixedRows, Load, Verdict, Work
from rlhf.rollout.submissions import collect
from tests.rollout.tiny import prompts

NOTHING = Load(0, 0)


def test_fixed_rows_come_back_in_their_order_whatever_the_order_of_ending():
    batch = prompts()
    feed = FixedRows([Work(batch.select(torch.tensor(rows))) for rows in ([3, 0], [5, 1, 2])])
    assert feed.verdict() == Verdict.GO_ON
    works = [feed.take(NOTHING), feed.take(NOTHING)]
    assert feed.take(NOTHING) is None
    assert feed.verdict() == Verdict.END
    feed.done(Rollout.unanswered(works[1].prompts.select(torch.tensor([2, 0]))))
    feed.done(Rollout.unanswered(works[0].prompts))
    feed.done(Rollout.unanswered(works[1].prompts.select(torch.tensor([1]))))
    assert feed.ordered().prompts.sample_ids.tolist() == [1003, 1000, 1005, 1001, 1002]


def test_another_attempt_at_a_sample_waits_until_the_first_is_back():
    batch = prompts((4, 5))
    feed = FixedRows([Work(batch), Work(batch, attempt=1)])
    feed.take(NOTHING)
    assert feed.take(NOTHING) is None
    feed.done(Rollout.unanswered(batch.select(torch.tensor([1]))))
    assert feed.take(NOTHING) is None
    assert feed.verdict() == Verdict.GO_ON
    feed.done(Rollout.unanswered(batch.select(torch.tensor([0]))))
    assert feed.take(NOTHING).attempt == 1
    feed.done(Rollout.unanswered(batch))
    assert feed.ordered().prompts.sample_ids.tolist() == [1000, 1001, 1000, 1001]


def test_a_work_has_each_sample_once_and_begun_responses_of_just_its_rows():
    batch = prompts((4, 5))
    with pytest.raises(EngineError, match=r"feed: samples \[1000, 1001, 1000\] are not all different"):
        Work(batch.select(torch.tensor([0, 1, 0])))
    with pytest.raises(EngineError, match=r"responses begun for samples \[1001, 1000\], but prompts of samples \[1000"):
        Work(batch, begun=Rollout.unanswered(batch.select(torch.tensor([1, 0]))))


class Echo:
    """An engine that answers at once, and notes its runs."""

    def __init__(self):
        self.runs = []

    def run(self, feed, sampling):
        self.runs.append(sampling.max_new_tokens)
        while feed is not None and (work := feed.take(NOTHING)) is not None:
            feed.done(Rollout.unanswered(work.prompts))


def test_submissions_are_one_run_for_each_change_of_sampling_on_every_rank():
    short, long = (SamplingConfig(max_new_tokens=count) for count in (3, 9))
    parts, engine, other = prompts((4, 5, 6, 7)).split([1, 1, 2]), Echo(), Echo()
    found = collect(engine, [(s, Work(part)) for s, part in zip((short, short, long), parts, strict=True)])
    assert found.prompts.sample_ids.tolist() == [1000, 1001, 1002, 1003]
    assert collect(other, [(short, None), (short, None), (long, None)]) is None
    assert engine.runs == other.runs == [3, 9]
