"""What SGLang says of a row, as an answer; what must not be believed is refused. No SGLang is needed."""

import math
from dataclasses import replace

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.data.batch import FinishReason, Rollout
from rlhf.errors import EngineError
from rlhf.rollout.feed import Work
from rlhf.rollout.ledger import Ledger
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.responses import answer_of, report_times
from rlhf.rollout.sglang.wire import Response, Times, pack_logprobs, pack_tokens
from tests.rollout.tiny import prompts


def said(number, tokens, logprobs, reason, versions, **more):
    return Response(number, pack_tokens(tokens), pack_logprobs(logprobs), reason, versions, **more)


SAID = (
    said(0, (5, 6, 7), (-1.0, -2.0, -3.0), "length", (("4", 3),)),
    said(1, (), (), "abort", ()),
    said(2, (8, 2), (-0.5, -0.25), "stop", (("4", 1), ("4", 1))),
)
ROWS = prompts((4, 1, 2))


def ledger_with(work=None, *, performance=None, max_new_tokens=3):
    """That of a run with the work taken, and its rows."""
    made = Ledger(
        SamplingConfig(max_new_tokens=max_new_tokens),
        vocab_size=131,
        kv_cache_tokens=100,
        run_seed=1,
        policy_version=4,
        where="sglang engine",
        performance=performance,
    )
    return made, made.take(work or Work(ROWS))


def end(ledger, row, response):
    answer = answer_of(row, response, max_new_tokens=3, version="4", may_be_aborted=True)
    ledger.end(row.number, answer.tokens, answer.logprobs, answer.reason)


def test_responses_come_back_in_the_order_of_ending_with_their_tokens_and_logprobs():
    ledger, rows = ledger_with()
    for at in (2, 0, 1):
        end(ledger, rows[at], SAID[at])
    found = ledger.finished()
    assert found.prompts.sample_ids.tolist() == [1002, 1000, 1001]
    assert found.responses.values.tolist() == [8, 2, 5, 6, 7]
    assert found.responses.lengths.tolist() == [2, 3, 0]
    assert found.rollout_logprobs.values.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert found.policy_versions.values.tolist() == [4] * 5
    assert found.finish_reasons.tolist() == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]
    assert ledger.finished() is None


def test_new_tokens_stand_behind_those_that_the_row_came_with():
    begun = Rollout.unanswered(ROWS)  # one token each, not sampled, of version -1
    ledger, rows = ledger_with(Work(ROWS, begun=begun))
    assert ledger.load(new_tokens=1) == ledger.load(new_tokens=0).__class__(rows=3, outstanding_tokens=3 * 2 - 1)
    end(ledger, rows[1], said(1, (5, 6), (-1.0, -2.0), "length", (("4", 2),)))
    found = ledger.finished()
    assert found.responses.values.tolist() == [int(ROWS.tokens.rows()[1][-1]), 5, 6]
    assert found.rollout_logprobs.values.tolist() == [0.0, -1.0, -2.0]
    assert found.policy_versions.values.tolist() == [-1, 4, 4]


def test_a_row_that_came_with_all_its_tokens_is_whole_and_asks_for_none():
    begun = Rollout.unanswered(ROWS)
    assert begun.finish_reasons.tolist() == [FinishReason.ABORT] * 3
    ledger, rows = ledger_with(Work(ROWS, begun=begun), max_new_tokens=1)
    assert rows == []
    assert ledger.load(new_tokens=0).outstanding_tokens == 0
    found = ledger.finished()
    assert found.finish_reasons.tolist() == [FinishReason.LENGTH] * 3
    assert torch.equal(found.responses.values, begun.responses.values)


@pytest.mark.parametrize(
    ("row", "changes", "named"),
    [
        (2, {"versions": (("3", 1), ("4", 1))}, r"was made by weights of version 3; needs those of the last update, 4"),
        (0, {"versions": (("4", 2),)}, "tells versions of 2 tokens, but gave 3"),
        (0, {"tokens": pack_tokens((5, 6)), "versions": (("4", 2),)}, "cut it after 2 tokens"),
        (2, {"logprobs": pack_logprobs((math.nan, -0.5))}, "got a log-prob that is not finite"),
        (0, {"logprobs": pack_logprobs((-math.inf, -1.0, -1.0))}, "got a log-prob that is not finite"),
        (1, {"error": "ValueError: too long"}, "SGLang did not answer: ValueError: too long"),
    ],
)
def test_what_cannot_be_trusted_is_refused_by_sample(row, changes, named):
    ledger, rows = ledger_with()
    with pytest.raises(EngineError, match=rf"sample {int(ROWS.sample_ids[row])}\b.*{named}"):
        end(ledger, rows[row], replace(SAID[row], **changes))


def test_the_monitor_hears_of_rows_by_the_clock_of_the_host():
    """The first row waits 1 of 10 s, the second is aborted in the queue at 5, of the third nothing is known."""
    clock = iter((0.0, 0.0, 10.0, 10.0))  # opened, taken, told of the third, asked
    ledger, rows = ledger_with(performance=(monitor := PerformanceMonitor(lambda: next(clock))))
    times = (Times(0.0, 1.0, 3.0, 9.0), Times(received=2.0, ended=5.0), Times())
    for row, one, at in zip(rows, SAID, times, strict=True):
        report_times(ledger, replace(one, times=at))
        answer = answer_of(row, one, max_new_tokens=3, version="4", may_be_aborted=True)
        ends = at.ended if math.isfinite(at.ended) else None
        ledger.end(row.number, answer.tokens, answer.logprobs, answer.reason, cached_tokens=3, at=ends)
    seen = monitor.window()
    assert seen.latency_s.tolist() == [9.0, 5.0, 10.0]
    assert seen.queue_s.tolist() == [1.0, 5.0, 10.0]
    assert seen.first_token_s.tolist()[0] == 3.0
    assert [math.isnan(at) for at in seen.first_token_s.tolist()] == [False, True, True]
    assert (seen.prompt_tokens, seen.cached_tokens, seen.response_tokens) == (7, 9, 5)
    assert (seen.prefill_s, seen.decode_s, seen.busy_s) == (2.0, 6.0, 8.0)


def test_packed_numbers_are_those_of_torch():
    row = ledger_with()[1][0]
    tokens, logprobs = (0, 130, 2**31 - 1), (-1e-3, -30.5, -0.1)
    answer = answer_of(row, said(0, tokens, logprobs, "stop", (("4", 3),)), max_new_tokens=3, version="4")
    assert torch.equal(answer.tokens, torch.tensor(tokens))
    assert torch.equal(answer.logprobs, torch.tensor(logprobs))
