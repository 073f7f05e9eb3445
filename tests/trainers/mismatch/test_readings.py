"""The search for the reading that an engine's log-probs are of."""

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.mcore.readings import Reading, read_logits
from rlhf.trainers.mismatch.readings import ROUNDS, configured, first_round, next_round


def test_greedy_tokens_are_read_at_temperature_one():
    assert configured(SamplingConfig(temperature=0.0)) == Reading(1.0)
    assert configured(SamplingConfig(temperature=0.4, top_p=0.5)) == Reading(0.4)


def test_the_first_round_tries_the_cuts_of_the_config_renormalised():
    tried = first_round(SamplingConfig(temperature=0.4, top_p=0.77, top_k=33, min_p=0.03))
    assert Reading(0.4, 0.77, 33, 0.03) in tried
    assert {Reading(0.4), Reading(1.0)} < set(tried)
    assert tuple(sorted(set(tried))) == tried


@pytest.mark.parametrize(
    "true",
    [
        *(Reading(0.83), Reading(0.31), Reading(4.4), Reading(1.0, top_p=0.87), Reading(1.0, top_k=14)),
        *(Reading(0.9, 0.8), Reading(1.0006), Reading(0.996), Reading(1.02), Reading(0.945)),
    ],
    ids=str,
)
def test_the_search_comes_close_to_the_true_reading(true):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 50, generator=generator) * 2
    kept = logits / true.temperature
    if true.is_cut:
        probs, order = kept.softmax(1).sort(1, descending=True)
        outside = (probs.cumsum(1) - probs >= true.top_p) | (torch.arange(50) >= (true.top_k or 50))
        kept = kept.scatter(1, order, kept.gather(1, order).masked_fill(outside, -torch.inf))
    targets = kept.softmax(1).multinomial(1, generator=generator)[:, 0]
    wanted = read_logits(logits, targets, [true])[:, 0]
    distances: dict[Reading, float] = {}
    tried = first_round(SamplingConfig())
    for _ in range(ROUNDS):
        found = read_logits(logits, targets, tried)
        distances |= {one: float((column - wanted).square().mean()) for one, column in zip(tried, found.T, strict=True)}
        tried = next_round(distances)
    best = min(distances, key=lambda one: distances[one])
    untouched = float((read_logits(logits, targets, [Reading(1.0)])[:, 0] - wanted).square().mean())
    both_wrong = true.is_cut and true.temperature != 1.0
    assert (
        distances[best] < (0.16 if both_wrong else 0.02) * untouched
    )  # 0.16 is a share of 60 %, which names the cause
    assert (best.top_p < 1.0, bool(best.top_k)) == (true.top_p < 1.0, bool(true.top_k))
    assert best.temperature == pytest.approx(true.temperature, rel=0.15 if both_wrong else 0.02)
