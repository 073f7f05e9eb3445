"""What SGLang says of a batch, as a rollout; what must not be believed is refused. No SGLang is needed."""

import math
from dataclasses import replace

import pytest

from rlhf.data.batch import FinishReason
from rlhf.errors import EngineError
from rlhf.rollout.sglang.responses import rollout_of
from rlhf.rollout.sglang.wire import Response
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
