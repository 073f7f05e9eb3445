"""What SGLang says of a batch, as a rollout; what must not be believed is refused. No SGLang is needed."""

import math
from dataclasses import replace

import pytest

from rlhf.data.batch import FinishReason
from rlhf.errors import EngineError
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.responses import report_times, rollout_of
from rlhf.rollout.sglang.wire import Response, Times
from tests.rollout.tiny import prompts

SAID = (
    Response(tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), reason="length", versions=(("4", 3),)),
    Response(tokens=(), logprobs=(), reason="abort", versions=()),
    Response(tokens=(8, 2), logprobs=(-0.5, -0.25), reason="stop", versions=(("4", 1), ("4", 1))),
)
ROWS = prompts((4, 1, 2))


def test_responses_keep_their_order_tokens_and_logprobs():
    found = rollout_of(ROWS, SAID, max_new_tokens=[3, 3, 9], version="4")
    assert found.responses.values.tolist() == [5, 6, 7, 8, 2]
    assert found.responses.lengths.tolist() == [3, 0, 2]
    assert found.rollout_logprobs.values.tolist() == [-1.0, -2.0, -3.0, -0.5, -0.25]
    assert found.policy_versions.values.tolist() == [4] * 5
    assert found.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP]


@pytest.mark.parametrize(
    ("row", "changes", "named"),
    [
        (2, {"versions": (("3", 1), ("4", 1))}, r"was made by weights of version 3; needs those of the last update, 4"),
        (0, {"versions": (("4", 2),)}, "tells versions of 2 tokens, but gave 3"),
        (0, {"tokens": (5, 6), "logprobs": (-1.0, -2.0), "versions": (("4", 2),)}, "cut it after 2 tokens"),
        (2, {"logprobs": (math.nan, -0.5)}, "got a log-prob that is not finite"),
        (0, {"logprobs": (-math.inf, -1.0, -1.0)}, "got a log-prob that is not finite"),
    ],
)
def test_what_cannot_be_trusted_is_refused_by_sample(row, changes, named):
    said = [replace(one, **changes) if at == row else one for at, one in enumerate(SAID)]
    with pytest.raises(EngineError, match=rf"sample {int(ROWS.sample_ids[row])}\b.*{named}"):
        rollout_of(ROWS, said, max_new_tokens=[3, 3, 9], version="4")


def test_the_monitor_hears_of_rows_by_the_clock_of_the_host():
    """The first row waits 1 of 10 s, the second is aborted in the queue at 5, of the third nothing is known."""
    times = (Times(0.0, 1.0, 3.0, 9.0), Times(received=2.0, ended=5.0), Times())
    said = [replace(one, times=at, cached_tokens=3) for one, at in zip(SAID, times, strict=True)]
    clock = iter((0.0, 10.0, 10.0))  # opened, told of the third, asked
    monitor = PerformanceMonitor(lambda: next(clock))
    report_times(monitor, ROWS, said)
    seen = monitor.window()
    assert seen.latency_s.tolist() == [9.0, 3.0, 0.0]
    assert seen.queue_s.tolist() == [1.0, 3.0, 0.0]
    assert seen.first_token_s.tolist()[0] == 3.0
    assert [math.isnan(at) for at in seen.first_token_s.tolist()] == [False, True, True]
    assert (seen.prompt_tokens, seen.cached_tokens, seen.response_tokens) == (7, 9, 5)
    assert (seen.prefill_s, seen.decode_s, seen.busy_s) == (2.0, 6.0, 8.0)
