"""The KL coefficient's controller against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algos.kl_controller import next_kl_coef

STEP = {"target": 6.0, "horizon": 10_000.0, "num_samples": 1_000.0}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2 * 1.01),  # a tenth too far: K e = 0.1 * 0.1
        (60.0, 0.2 * 1.02),  # the error stops at 0.2
        (5.4, 0.2 * 0.99),
        (-3.0, 0.2 * 0.98),  # k1 may measure less than nothing
    ],
)
def test_hand_computed(kl, expected):
    assert next_kl_coef(0.2, kl, **STEP) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_moves_nothing(kl):
    assert next_kl_coef(0.2, kl, **STEP) == 0.2


def test_a_step_without_responses_moves_nothing():
    assert next_kl_coef(0.2, 0.0, target=6.0, horizon=10.0, num_samples=0.0) == 0.2


@given(kl=st.floats(-1e6, 1e6), kl_coef=st.floats(1e-6, 10), num_samples=st.integers(1, 1000))
def test_the_coefficient_stays_positive_and_moves_towards_the_target(kl, kl_coef, num_samples):
    moved = next_kl_coef(kl_coef, kl, target=6.0, horizon=1000.0, num_samples=num_samples)
    assert 0.8 * kl_coef <= moved * (1 + 1e-12)
    assert moved <= 1.2 * kl_coef * (1 + 1e-12)
    assert (moved - kl_coef) * (kl - 6.0) >= 0


def test_it_settles_where_the_divergence_is_the_target():
    """A plant whose KL falls as the coefficient rises, KL = 3 / coef: the fixed point is coef = 0.5."""
    kl_coef = 0.01
    for _ in range(2000):
        kl_coef = next_kl_coef(kl_coef, 3 / kl_coef, **STEP)
    assert kl_coef == pytest.approx(0.5, rel=1e-3)
