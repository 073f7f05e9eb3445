"""Which tokens are compared, and what their differences add up to, against numbers worked out by hand."""

import math

import pytest
import torch

from rlhf.config.mismatch import MismatchConfig, MismatchLimits
from rlhf.data.batch import PromptBatch, PromptRecord, Provenance, Rollout
from rlhf.data.ragged import Ragged
from rlhf.trainers.mismatch.tally import LOUDEST, Tally, comparable, worst_of_rows

NO_LIMIT = MismatchLimits(mean=0.0, max=0.0)


def rollout(*, versions=(3, 3, 3, 3), provenance=(Provenance.SAMPLED,) * 4) -> Rollout:
    """Two rows of 3 and 1 tokens with log-probs -1, -2, -3 and -4."""
    lengths = torch.tensor([3, 1])
    prompts = PromptBatch(
        torch.tensor([8, 9]),
        torch.tensor([4, 4]),
        Ragged(torch.tensor([1, 1]), torch.tensor([1, 1])),
        (PromptRecord("", "", {}),) * 2,
    )
    return Rollout(
        prompts,
        Ragged(torch.tensor([5, 6, 7, 8]), lengths),
        Ragged(torch.tensor([-1.0, -2.0, -3.0, -4.0]), lengths),
        torch.zeros(2, dtype=torch.int8),
        Ragged(torch.tensor(provenance, dtype=torch.uint8), lengths),
        Ragged(torch.tensor(versions, dtype=torch.int32), lengths),
    )


def test_sums_by_hand():
    tally = Tally.of(rollout(), torch.tensor([-1.5, -2.0, -3.0, -3.0]), 3)
    found = tally.metrics(breach=False)
    assert (found.tokens, found.other_tokens, found.breach) == (4, 0, 0.0)
    assert (found.mean, found.max) == pytest.approx(((0.5 + 1.0) / 4, 1.0))
    assert found.ratio == pytest.approx((math.exp(-0.5) + 2 + math.e) / 4)
    assert found.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.e - 2) / 4)


def test_parts_of_ranks_add_up_to_the_whole():
    whole, old = rollout(), torch.tensor([-1.5, -2.25, -3.0, -3.0])
    rows = [whole.select(torch.tensor([at])) for at in (0, 1)]
    parts = [Tally.of(rows[0], old[:3], 3), Tally.of(rows[1], old[3:], 3), Tally.of(Rollout.empty(), old[:0], 3)]
    assert sum(parts, Tally()) == Tally.of(whole, old, 3)


def test_tokens_of_earlier_versions_and_tokens_that_nobody_drew_are_not_compared():
    mixed = rollout(versions=(2, 3, 3, 2), provenance=(Provenance.SAMPLED, Provenance.TOOL, *(Provenance.SAMPLED,) * 2))
    assert comparable(mixed, 3).tolist() == [False, False, True, False]
    tally = Tally.of(mixed, torch.tensor([50.0, 50.0, -3.0, 50.0]), 3)
    assert (tally.tokens, tally.other_tokens, tally.largest, tally.breach(MismatchLimits(mean=1e-9, max=1e-9))) == (
        *(1, 2, 0.0),
        "",
    )
    assert worst_of_rows(mixed, torch.tensor([50.0, 50.0, -2.5, 50.0]), 3).tolist() == [0.5, -1.0]


def test_rows_that_no_engine_answered_are_not_compared():
    unanswered = Rollout.unanswered(rollout().prompts)
    assert Tally.of(unanswered, torch.tensor([-7.0, -7.0]), 3) == Tally()


def test_not_one_token_of_this_step_is_a_breach_whatever_the_limits():
    tally = Tally.of(rollout(versions=(2, 2, 2, 2)), torch.zeros(4), 3)
    assert tally.is_stale
    assert "none of 4 tokens" in tally.breach(NO_LIMIT)
    assert not Tally().is_stale  # nobody was asked
    for begun_tokens, is_stale in ((3, True), (4, False), (9, False)):  # more: of rows that are not among these
        part = Tally.of(rollout(versions=(2, 2, 2, 2)), torch.zeros(4), 3, begun_tokens=begun_tokens)
        assert (part + Tally()).is_stale == is_stale
    assert Tally().breach(NO_LIMIT) == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_is_a_breach_and_keeps_the_numbers_finite(bad):
    tally = Tally.of(rollout(), torch.tensor([bad, -2.0, -3.0, -4.0]), 3)
    assert "not finite" in tally.breach(NO_LIMIT)
    found = tally.metrics(breach=True)
    assert found.max == LOUDEST
    assert math.isfinite(found.ratio)
    assert math.isfinite(found.kl)
    assert worst_of_rows(rollout(), torch.tensor([bad, -2.0, -3.0, -4.0]), 3).tolist() == [LOUDEST, 0.0]


def test_limits():
    tally = Tally.of(rollout(), torch.tensor([-1.5, -2.0, -3.0, -3.0]), 3)
    assert tally.breach(MismatchLimits(mean=0.376, max=1.01)) == ""
    assert "mean" in tally.breach(MismatchLimits(mean=0.374, max=0.0))
    assert "largest" in tally.breach(MismatchLimits(mean=0.0, max=0.99))
    cold = MismatchConfig().limits("float32").at(0.1)
    assert cold.max == pytest.approx(10 * MismatchConfig().float32.max)
    assert MismatchConfig().float32.at(2.0) == MismatchConfig().float32.at(0.0) == MismatchConfig().float32
