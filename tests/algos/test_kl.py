import math

import pytest
import torch

from rlhf.algos.kl import kl_estimate, token_rewards
from rlhf.errors import ShapeError


def test_hand_computed_estimates():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    for estimator, expected in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)):
        torch.testing.assert_close(kl_estimate(logprobs, ref, estimator=estimator), torch.tensor([expected]))


def test_k1_and_k3_average_to_the_divergence_and_k2_comes_near_it():
    # Exact expectation over a four-token distribution in float64: no sampling noise.
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.15, 0.18, 0.33, 0.34], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for estimator, tolerance in (("k1", 1e-7), ("k3", 1e-7), ("k2", 0.07 * exact)):
        mean = float((p * kl_estimate(p.log(), q.log(), estimator=estimator).double()).sum())
        assert abs(mean - exact) < tolerance, estimator


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_finite_with_finite_gradient_at_log_ratios_of_100(estimator):
    logprobs = torch.tensor([-100.0, 0.0, -1.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([0.0, -100.0, -1.0]), estimator=estimator)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert kl[2] == 0
    if estimator != "k1":
        assert (kl >= 0).all()


def test_score_lands_on_the_last_token_of_each_filled_row():
    rewards = token_rewards(
        torch.tensor([1.0, 7.0, -2.0]),
        torch.tensor([0.5, -1.0, 2.0]),
        torch.tensor([True, True, False]),
        torch.tensor([2, 0, 1]),
        kl_coef=0.1,
    )
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 0.1 + 1.0, -2.0]))


def test_what_stands_on_a_masked_token_does_not_matter():
    args = dict(loss_mask=torch.tensor([False, True]), lengths=torch.tensor([2]), kl_coef=0.5)
    clean = token_rewards(torch.tensor([1.0]), torch.tensor([0.0, 3.0]), **args)
    dirty = token_rewards(torch.tensor([1.0]), torch.tensor([float("nan"), 3.0]), **args)
    assert torch.equal(clean, dirty)


def test_the_rewards_of_a_row_sum_to_score_minus_penalty():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 5])
    kl, scores = torch.randn(9, generator=generator), torch.randn(3, generator=generator)
    rewards = token_rewards(scores, kl, torch.ones(9, dtype=torch.bool), lengths, kl_coef=0.3)
    for row, k, score in zip(rewards.split([3, 1, 5]), kl.split([3, 1, 5]), scores, strict=True):
        torch.testing.assert_close(row.sum(), score - 0.3 * k.sum())


def test_misfit_scores_are_refused():
    with pytest.raises(ShapeError, match="scores"):
        token_rewards(torch.zeros(2), torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([3]), kl_coef=0.1)
