"""Random numbers as a function of counters, so that a sample's tokens depend on nothing but the sample.

The mixing function is that of SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants of variant 13 in David Stafford's list.
"""

from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = 2**64 - 1


def sample_seed(run_seed: int, sample_id: int, attempt: int) -> int:
    """Seed of one sample, as int64. Different triples give unrelated seeds; an attempt above 0 is a resample."""
    state = 0
    for value in (run_seed, sample_id, attempt):
        state = _mix((state + _GAMMA + value) & _MASK)
    return _signed(state)


def shifted(seed: int, by: int) -> int:
    """The seed whose uniform numbers at position p + by are those of `seed` at p, as int64.

    For engines that count positions from somewhere else than the beginning of a response.
    """
    return _signed((seed - by * _GAMMA) & _MASK)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) for (seed, position) pairs.

    seeds, positions: int64, shapes that broadcast. Returns float64 with 53 random bits, the same on every device.
    """
    state = seeds + (positions + 1) * _signed(_GAMMA)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        state = (state ^ _shift_right(state, shift)) * _signed(multiplier)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(state: int) -> int:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        state = ((state ^ (state >> shift)) * multiplier) & _MASK
    return state


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(state: Tensor, by: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (state >> by) & (2 ** (64 - by) - 1)
