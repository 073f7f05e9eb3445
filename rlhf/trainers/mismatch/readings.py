"""Which other readings of its logits the trainer tries against an engine's log-probs. Pure."""

from collections.abc import Mapping

from rlhf.config.rollout import SamplingConfig
from rlhf.mcore.readings import Reading

WIDEST = 5.0
"""Temperatures are tried from this many times less to this many times more than the configured one."""
COARSE, FINE = 15, 9
"""Temperatures of the first round, and of each of the others."""
ROUNDS = 4
"""Of temperatures: each looks between the neighbours of the best one so far."""
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1)


def configured(sampling: SamplingConfig) -> Reading:
    """What both sides should report: greedy tokens are of temperature 1, and no cut renormalises."""
    return Reading(sampling.temperature or 1.0)


def first_round(sampling: SamplingConfig) -> tuple[Reading, ...]:
    """A wide range of temperatures; cuts that renormalise, those of the config among them."""
    middle = configured(sampling).temperature
    special = {1.0, middle * middle, 1.0 / middle}
    temperatures = special | set(_between(middle / WIDEST, middle * WIDEST, COARSE)) | {middle}
    cuts = {(p, 0, 0.0) for p in TOP_P} | {(1.0, k, 0.0) for k in TOP_K} | {(1.0, 0, p) for p in MIN_P}
    cuts |= {(sampling.top_p, sampling.top_k, 0.0)} - {(1.0, 0, 0.0)}
    readings = {Reading(t) for t in temperatures} | {Reading(t, *cut) for t in {middle, 1.0} for cut in cuts}
    return tuple(sorted(readings))


def next_round(differences: Mapping[Reading, float]) -> tuple[Reading, ...]:
    """Temperatures between the neighbours of the best one so far; cut as it is, if a cut was best."""
    best = min(differences, key=lambda one: (differences[one], one))
    same_cut = {one.temperature for one in differences if _cut(one) == _cut(best)}
    if best.is_cut and len(same_cut) <= 2:  # tried at one or two temperatures so far
        low, high = best.temperature / WIDEST, best.temperature * WIDEST
    else:
        low = max((t for t in same_cut if t < best.temperature), default=best.temperature / 2)
        high = min((t for t in same_cut if t > best.temperature), default=best.temperature * 2)
    return tuple(Reading(t, best.top_p, best.top_k, best.min_p) for t in _between(low, high, FINE) if t not in same_cut)


def _cut(reading: Reading) -> tuple[float, int, float]:
    return reading.top_p, reading.top_k, reading.min_p


def _between(low: float, high: float, count: int) -> list[float]:
    """So many temperatures, evenly on a logarithmic scale."""
    return [low * (high / low) ** (at / (count - 1)) for at in range(count)]
