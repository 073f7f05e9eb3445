"""Log-probs under other readings of logits, against the definition written out, and through tensor-parallel models."""

import itertools

import pytest
import torch

from rlhf.config.rollout import SamplingConfig
from rlhf.mcore.readings import Reading, read_logits
from rlhf.rollout.native.sampler import sample

READINGS = sorted(
    Reading(t, p, k, m)
    for t, (p, k, m) in itertools.product(
        (0.5, 1.0, 1.7), ((1.0, 0, 0.0), (0.8, 0, 0.0), (1.0, 3, 0.0), (0.9, 5, 0.0), (1.0, 0, 0.2), (0.7, 4, 0.1))
    )
)


def by_definition(logits: torch.Tensor, target: int, reading: Reading) -> float:
    """One row, entry by entry, in float64."""
    probs = (logits.double() / reading.temperature).softmax(0).tolist()
    kept = sorted(range(len(probs)), key=lambda token: -probs[token])[: reading.top_k or len(probs)]
    total, held, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if held >= reading.top_p * total and reading.top_p < 1.0:
            break
        nucleus.append(token)
        held += probs[token]
    nucleus = [token for token in nucleus if probs[token] >= reading.min_p * max(probs)]
    mass = sum(probs[token] for token in nucleus)
    inside = target in nucleus
    return float(torch.tensor(probs[target] / (mass if inside and reading.is_cut else 1.0)).log())


def test_readings_are_what_their_definition_says():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 13, generator=generator) * 2
    targets = torch.randint(0, 13, (40,), generator=generator)
    found = read_logits(logits, targets, READINGS)
    wanted = [[by_definition(row, int(t), one) for one in READINGS] for row, t in zip(logits, targets, strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted), atol=2e-6, rtol=0)
    assert {one.is_cut for one in READINGS} == {True, False}


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.7), SamplingConfig(temperature=0.7, top_p=0.8)])
def test_a_plain_reading_is_what_the_native_engine_reports(sampling):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(32, 64, generator=generator) * 3
    tokens, logprobs = sample(logits.clone(), 61, torch.rand(32, generator=generator).double(), sampling)
    found = read_logits(logits[:, :61], tokens, [Reading(0.7)])
    torch.testing.assert_close(found[:, 0], logprobs, atol=2e-6, rtol=0)


def test_words():
    assert str(Reading(0.7)) == "temperature 0.7"
    assert str(Reading(1.0, top_p=0.9, top_k=20)) == "temperature 1, top_p 0.9, top_k 20, renormalised"
