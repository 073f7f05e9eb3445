import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algos.gae import gae
from rlhf.errors import ShapeError


def slow_gae(rewards, values, lengths, gamma, lam):
    """Token by token, python floats (float64), straight from eq. 16's recursion."""
    advantages, at = [], 0
    for length in lengths:
        r, v = rewards[at : at + length], values[at : at + length]
        row, following = [0.0] * length, 0.0
        for t in reversed(range(length)):
            next_value = v[t + 1] if t + 1 < length else 0.0
            following = r[t] + gamma * next_value - v[t] + gamma * lam * following
            row[t] = following
        advantages += row
        at += length
    return advantages


def flat(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def test_hand_computed_two_rows():
    # Row 1: delta = (0 + .9*.4 - .5, 1 - .4) = (-.14, .6); A = (-.14 + .72*.6, .6). Row 2: one token, 2 - 1.5.
    advantages, returns = gae(flat(0, 1, 2), flat(0.5, 0.4, 1.5), torch.tensor([2, 1]), gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(advantages, flat(0.292, 0.6, 0.5))
    torch.testing.assert_close(returns, flat(0.792, 1.0, 2.0))


def test_lambda_zero_is_td_error():
    advantages, _ = gae(flat(1, 2, 3), flat(4, 5, 6), torch.tensor([3]), gamma=0.5, gae_lambda=0.0)
    torch.testing.assert_close(advantages, flat(1 + 2.5 - 4, 2 + 3 - 5, 3 - 6))


def test_lambda_one_returns_are_monte_carlo_whatever_the_values():
    for values in (flat(0, 0, 0, 0), flat(9, -3, 2, 7)):
        _, returns = gae(flat(1, 2, 3, 5), values, torch.tensor([3, 1]), gamma=1.0, gae_lambda=1.0)
        torch.testing.assert_close(returns, flat(6, 5, 3, 5))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 23), max_size=7),
    gamma=st.sampled_from([0.0, 0.37, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_equals_the_recursion_for_any_lengths(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator)
    advantages, returns = gae(rewards, values, torch.tensor(lengths, dtype=torch.int64), gamma=gamma, gae_lambda=lam)
    expected = torch.tensor(slow_gae(rewards.tolist(), values.tolist(), lengths, gamma, lam), dtype=torch.float32)
    # Up to 23 fp32 terms of size ~3, each rounded at 6e-8 relative.
    torch.testing.assert_close(advantages, expected, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(returns, expected + values, atol=3e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 12, generator=generator)
    whole, _ = gae(rewards, values, torch.tensor([4, 0, 8]), gamma=0.9, gae_lambda=0.9)
    alone, _ = gae(rewards[4:], values[4:], torch.tensor([8]), gamma=0.9, gae_lambda=0.9)
    assert torch.equal(whole[4:], alone)


def test_no_rows_and_empty_rows_give_nothing():
    for lengths in ([], [0, 0]):
        advantages, returns = gae(
            torch.zeros(0), torch.zeros(0), torch.tensor(lengths, dtype=torch.int64), gamma=1.0, gae_lambda=1.0
        )
        assert advantages.shape == returns.shape == (0,)


def test_a_tensor_of_another_length_is_refused_by_name():
    with pytest.raises(ShapeError, match=r"gae: values \(4,\)"):
        gae(torch.zeros(3), torch.zeros(4), torch.tensor([3]), gamma=1.0, gae_lambda=1.0)
