import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algos.whiten import Moments, whiten


def test_hand_computed():
    # Mean 3, mean squared distance (4 + 0 + 4) / 3.
    values, mask = torch.tensor([1.0, 99.0, 3.0, 5.0]), torch.tensor([True, False, True, True])
    moments = Moments.of(values, mask)
    assert (moments.count, moments.total, moments.total_sq) == (3, 9, 35)
    root = (8 / 3) ** 0.5
    torch.testing.assert_close(whiten(values, mask, moments), torch.tensor([-2 / root, 0.0, 0.0, 2 / root]))


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=5), shift=st.floats(-1e3, 1e3), seed=st.integers(0, 999))
def test_the_moments_of_parts_add_up_and_give_mean_0_variance_1(cuts, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    n = sum(cuts) + 3
    values = torch.randn(n, generator=generator) + shift
    mask = torch.ones(n, dtype=torch.bool)
    mask[0] = False
    parts = zip(values.split([*cuts, 3]), mask.split([*cuts, 3]), strict=True)
    summed = sum((Moments.of(v, m).to_tensor() for v, m in parts), torch.zeros(3, dtype=torch.float64))
    white = whiten(values, mask, Moments.from_tensor(summed))[mask].double()
    # fp32 holds values near 1e3 to 6e-5; their spread is about 1.
    assert abs(float(white.mean())) < 1e-4
    assert abs(float(white.var(correction=0)) - 1) < 1e-3


def test_equal_values_become_zero_not_nan():
    values, mask = torch.full((5,), 0.7), torch.ones(5, dtype=torch.bool)
    assert whiten(values, mask, Moments.of(values, mask)).abs().max() < 1e-3


def test_nothing_to_whiten_gives_zeros():
    values, mask = torch.tensor([float("nan"), 2.0]), torch.zeros(2, dtype=torch.bool)
    moments = Moments.of(values, mask)
    assert moments == Moments(0.0, 0.0, 0.0)
    assert whiten(values, mask, moments).tolist() == [0.0, 0.0]
