"""Which other readings of its logits the trainer tries against an engine's log-probs. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from rlhf.config.rollout import SamplingConfig
from rlhf.mcore.readings import Reading

WIDEST = 5.0
"""Temperatures are tried from this many times less to this many times more than the configured one."""
NEAR = (0.001, 0.003, 0.01, 0.03, 0.1)
"""So far beside it, as shares of it and both ways, they are tried too: what fits best is where a search goes on."""
COARSE, FINE = 15, 9
"""Temperatures of the first round, and values of a field in each of the others."""
ROUNDS = 4
"""Each looks between the neighbours of the best reading so far."""
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1)


def configured(sampling: SamplingConfig) -> Reading:
    """What both sides should report: greedy tokens are of temperature 1, and no cut renormalises."""
    return Reading(sampling.temperature or 1.0)


def first_round(sampling: SamplingConfig) -> tuple[Reading, ...]:
    """A wide range of temperatures; cuts that renormalise, those of the config among them."""
    middle = configured(sampling).temperature
    special = {1.0, middle * middle, 1.0 / middle} | {middle * (1.0 + sign * part) for part in NEAR for sign in (-1, 1)}
    temperatures = special | set(_between(middle / WIDEST, middle * WIDEST, COARSE)) | {middle}
    cuts = {(p, 0, 0.0) for p in TOP_P} | {(1.0, k, 0.0) for k in TOP_K} | {(1.0, 0, p) for p in MIN_P}
    cuts |= {(sampling.top_p, sampling.top_k, sampling.min_p)} - {(1.0, 0, 0.0)}
    readings = {Reading(t) for t in temperatures} | {Reading(t, *cut) for t in {middle, 1.0} for cut in cuts}
    return tuple(sorted(readings))


def next_round(differences: Mapping[Reading, float]) -> tuple[Reading, ...]:
    """Closer to the best readings so far: of those that cut alike, the best one's fields, one at a time."""
    tried, best = set(differences), dict[tuple[bool, bool, bool], Reading]()
    for one in sorted(tried, key=lambda one: (differences[one], one)):
        best.setdefault((one.top_p < 1.0, bool(one.top_k), bool(one.min_p)), one)
    return tuple(sorted({near for one in best.values() for near in _near(one, tried)} - tried))


def _near(best: Reading, tried: Collection[Reading]) -> Iterator[Reading]:
    yield from (replace(best, temperature=value) for value in _around(best, "temperature", tried))
    if best.top_p < 1.0:
        yield from (replace(best, top_p=min(1.0, value)) for value in _around(best, "top_p", tried))
    if best.top_k:
        yield from (replace(best, top_k=max(1, round(value))) for value in _around(best, "top_k", tried))
    if best.min_p:
        yield from (replace(best, min_p=min(1.0, value)) for value in _around(best, "min_p", tried))


def _around(best: Reading, name: str, tried: Collection[Reading]) -> list[float]:
    """Values of one field between the nearest ones that were tried with the others as they are."""
    here: float = getattr(best, name)
    others = [part for part in ("temperature", "top_p", "top_k", "min_p") if part != name]
    alike = [one for one in tried if all(getattr(one, part) == getattr(best, part) for part in others)]
    values = {value for one in alike if (value := getattr(one, name)) > 0}
    low = max((value for value in values if value < here), default=here / WIDEST)
    high = min((value for value in values if value > here), default=here * WIDEST)
    return _between(low, high, FINE)


def _between(low: float, high: float, count: int) -> list[float]:
    """So many temperatures, evenly on a logarithmic scale."""
    return [low * (high / low) ** (at / (count - 1)) for at in range(count)]
