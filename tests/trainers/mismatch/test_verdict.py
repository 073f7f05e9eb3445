"""Evidence made by hand, and the cause that it speaks for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rlhf.mcore.readings import Reading
from rlhf.trainers.mismatch.evidence import Again, Evidence, ReplayedRow, WeightCheck
from rlhf.trainers.mismatch.report import as_text
from rlhf.trainers.mismatch.tally import Tally
from rlhf.trainers.mismatch.verdict import ADVICE, Cause, judge, stale

EQUAL = WeightCheck(was_possible=True, of=20)
SET = Reading(1.0)


def row(rollout: Sequence[float], old: Sequence[float], *, alone: Sequence[float] | None = None) -> ReplayedRow:
    count = len(rollout)
    return ReplayedRow(
        sample_id=4,
        prompt_tokens=3,
        is_drawn=True,
        responses=torch.arange(count),
        counts=torch.ones(count, dtype=torch.bool),
        rollout_logprobs=torch.tensor(rollout),
        old_logprobs=torch.tensor(old),
        alone=torch.tensor(old if alone is None else alone),
    )


def again(rollout: Sequence[float], trainer: Sequence[float], *, engine: int = 0, first_token: int = 0) -> Again:
    tokens = torch.arange(len(rollout)) + first_token
    return Again(engine, 0, tokens, torch.tensor(rollout), torch.tensor(trainer))


def evidence(*rows: ReplayedRow, alone: Sequence[Again] = (), step_mean: float = 0.5, **more: object) -> Evidence:
    given = {"readings": {}, "together": (), "weights": EQUAL, "sampling": SET, **more}
    return Evidence(rows=rows, alone=tuple(alone), step_mean=step_mean, **given)  # type: ignore[arg-type]


NOISE = row([-1.0, -2.0, -3.0, -1.5], [-1.5, -1.5, -3.5, -1.0])
"""Half a nat to either side."""


def shares(found: Evidence) -> dict[Cause, float]:
    return {score.cause: score.share for score in judge(found).scores}


def test_every_cause_is_scored_and_has_advice():
    assert list(shares(evidence(NOISE))) == list(Cause) == list(ADVICE)


def test_what_nothing_explains_is_the_kernels():
    verdict = judge(evidence(NOISE, alone=[again([-1.0, -2.0, -3.0, -1.5], [-1.5, -1.5, -3.5, -1.0])]))
    assert verdict.cause is Cause.KERNELS
    assert (verdict.difference, verdict.tokens) == (0.5, 4)
    assert "noise about 0" in verdict.finding
    assert "rank 0 5.0e-01" in verdict.finding


def test_different_tensors_are_the_cause_whatever_else_explains():
    check = WeightCheck(was_possible=True, tensors=("a.weight",), of=20, text="rank 3 holds a.weight otherwise")
    shifted = row([-2.0, -3.0, -1.5], [-1.0, -2.0, -3.0])
    verdict = judge(evidence(shifted, weights=check))
    assert verdict.cause is Cause.WEIGHTS
    assert verdict.finding == "1 of 20 tensors differ: rank 3 holds a.weight otherwise"
    lost = judge(evidence(NOISE, weights=replace(check, tensors=tuple(map(str, range(18))))))
    assert "as if an update had not arrived" in lost.finding
    assert stale(7, 3).cause is Cause.WEIGHTS


@pytest.mark.parametrize(
    ("rollout", "word"), [([-2.0, -3.0, -1.5, -0.5, -9.0], "after"), ([-9.0, -1.0, -2.0, -3.0, -1.5], "before")]
)
def test_neighbouring_tokens(rollout, word):
    verdict = judge(evidence(row(rollout, [-1.0, -2.0, -3.0, -1.5, -0.5])))
    assert (verdict.cause, verdict.scores[1].share) == (Cause.SHIFT, 1.0)
    assert f"of the token {word}" in verdict.finding


def test_a_reading_counts_for_what_it_explains_beyond_scoring_alone():
    one = row([-1.0, -2.0] * 2, [-2.0, -3.0] * 2, alone=[-1.5, -2.5] * 2)
    read = {Reading(1.0): (torch.tensor([-1.5, -2.5] * 2),), Reading(0.5): (torch.tensor([-1.25, -2.25] * 2),)}
    found = shares(evidence(one, readings=read))
    assert found[Cause.PACKING] == pytest.approx(0.5)
    assert found[Cause.SAMPLING] == pytest.approx(0.25)


def test_a_trainer_that_scores_a_row_otherwise_alone_packs_wrong():
    verdict = judge(evidence(row([-1.0, -2.0], [-2.0, -3.0], alone=[-1.0, -2.0])))
    assert verdict.cause is Cause.PACKING
    assert verdict.finding.startswith("trainer")


def test_an_engine_that_is_right_alone_depends_on_its_batch():
    right = again([-1.5, -1.5], [-1.5, -1.5], first_token=9)  # other tokens, so against the whole step
    verdict = judge(evidence(NOISE, alone=[right]))
    assert (verdict.cause, verdict.scores[3].share) == (Cause.PACKING, 1.0)
    assert verdict.finding.startswith("engine")


def test_one_engine_of_several_that_differs_alone_too_is_not_packing():
    right, wrong = again([-1.5], [-1.5], engine=0, first_token=9), again([-1.5], [-1.0], engine=4, first_token=9)
    verdict = judge(evidence(NOISE, alone=[right, wrong]))
    assert verdict.cause is Cause.KERNELS
    assert "of rank 0 0.0e+00, of rank 4 5.0e-01" in verdict.finding


def test_a_fault_of_one_engine_of_several_is_told_by_the_rows_that_differ():
    right = row([-1.0, -2.0, -3.0, -1.5], [-1.0, -2.0, -3.0, -1.5 + 1e-6])
    moved = row([-2.0, -3.0, -1.5, -0.5, -9.0], [-1.0, -2.0, -3.0, -1.5, -0.5])
    verdict = judge(evidence(right, moved, right, right))
    assert (verdict.cause, verdict.scores[1].share, verdict.tokens) == (Cause.SHIFT, 1.0, 17)
    hot = row([-1.5] * 4, [-1.0] * 4)
    read = {
        SET: tuple(one.alone for one in (right, right, hot, right)),
        Reading(1.4): tuple(one - 0.5 for one in (right.alone, right.alone, hot.alone, right.alone)),
    }
    verdict = judge(evidence(right, right, hot, right, readings=read))
    assert (verdict.cause, verdict.scores[2].share) == (Cause.SAMPLING, 1.0)
    assert "of temperature 1.4" in verdict.finding


def test_rows_that_differ_little_are_heard_where_the_others_are_too_short():
    sizes = (0.9, 0.8, 0.1, 0.05, 0.02)
    rows = [row([-1.0 - size], [-1.0]) for size in sizes]
    read = {Reading(1.4): tuple(torch.tensor([-1.0 - size]) for size in sizes)}
    assert judge(evidence(*rows, readings=read)).cause is Cause.SAMPLING
    moved = row([-2.0, -9.0], [-1.0, -2.0])
    little = row([-1.1, -1.0], [-1.0, -1.1])
    assert judge(evidence(moved, little, little, little)).cause is Cause.SHIFT


def test_the_worst_of_many_rows_that_come_out_better_with_other_tokens_prove_nothing():
    better = again([-1.5, -1.5], [-1.4, -1.6], first_token=9)
    assert judge(evidence(NOISE, alone=[better], step_mean=0.1)).cause is Cause.KERNELS


def test_new_answers_of_which_only_the_beginning_was_asked_are_compared_with_the_beginning():
    half = again([-1.0, -2.0], [-1.0, -2.0])
    assert judge(evidence(NOISE, alone=[half], step_mean=0.0)).cause is Cause.PACKING


def test_what_may_have_been_mended_by_new_weights_is_not_called_packing():
    given_back = WeightCheck(was_possible=False)
    right = again([-1.0, -2.0, -3.0, -1.5], [-1.0, -2.0, -3.0, -1.5])
    assert judge(evidence(NOISE, alone=[right], together=(right,), weights=given_back)).cause is Cause.WEIGHTS
    wrong = again([-1.0, -2.0, -3.0, -1.5], [-1.5, -1.5, -3.5, -1.0])
    assert judge(evidence(NOISE, alone=[right], together=(wrong,), weights=given_back)).cause is Cause.PACKING
    assert judge(evidence(NOISE, alone=[wrong], together=(wrong,), weights=given_back)).cause is Cause.KERNELS


def test_the_surer_evidence_wins_where_two_explain_all():
    moved = row([-2.0, -3.0, -1.5, -4.0, -4.0], [-1.0, -2.0, -3.0, -1.5, -4.0])
    right = again([-2.0, -3.0, -1.5, -4.0, -4.0], [-2.0, -3.0, -1.5, -4.0, -4.0])
    assert judge(evidence(moved, alone=[right])).cause is Cause.SHIFT


def test_a_neighbour_or_a_temperature_that_fits_a_few_tokens_is_chance():
    few = row([-2.0, -3.0, -1.5], [-1.0, -2.0, -3.0])
    read = {Reading(0.5): (torch.tensor([-2.0, -3.0, -1.5]),)}
    assert judge(evidence(few, readings=read)).cause is Cause.KERNELS


def test_tokens_that_are_not_finite_or_not_compared_are_left_out():
    odd = replace(
        row([-1.0, float("nan"), -3.0, -50.0], [-1.5, -1.5, float("-inf"), -1.0]),
        counts=torch.tensor([True, True, True, False]),
    )
    verdict = judge(evidence(odd))
    assert (verdict.cause, verdict.tokens, verdict.difference) == (Cause.KERNELS, 1, 0.5)
    nothing = judge(evidence(replace(odd, counts=torch.zeros(4, dtype=torch.bool))))
    assert "nothing could be compared" in nothing.finding


def test_where_no_engine_was_seen_the_cause_is_unknown_unless_the_trainer_alone_explains_it():
    blind = {"weights": WeightCheck(was_possible=False), "lost_engines": 2}
    verdict = judge(evidence(NOISE, **blind))
    assert (verdict.cause, verdict.name) == (None, "unknown")
    assert verdict.finding == "no engine could be compared or asked again"
    assert verdict.scores[0].finding.startswith("not known")
    packed = row([-1.0, -2.0, -3.0], [-1.5, -1.5, -3.5], alone=[-1.0, -2.0, -3.0])
    assert judge(evidence(packed, **blind)).cause is Cause.PACKING
    text = as_text(3, "over a limit", Tally(), verdict, [NOISE])
    assert "cause: UNKNOWN: no engine could be compared" in text
    assert "2 engines lost meanwhile and replaced" in text


def test_an_engine_that_is_right_in_a_batch_too_once_it_was_replaced_has_no_fault_of_packing():
    right = [again([-1.5, -1.5, -3.5, -1.0], [-1.5, -1.5, -3.5, -1.0])]
    seen = evidence(NOISE, alone=right, together=tuple(right))
    assert shares(seen)[Cause.PACKING] == 1.0  # of an engine that has lived through it
    assert shares(replace(seen, lost_engines=1))[Cause.PACKING] == 0.0
