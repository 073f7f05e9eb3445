import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algos.losses import cross_entropy_loss, entropy_bonus, policy_loss, value_loss
from rlhf.errors import ShapeError

NAN, INF = float("nan"), float("inf")


def ones(n):
    return torch.ones(n, dtype=torch.bool)


def slow_policy_loss(logprobs, old, advantages, mask, eps, denominator):
    """Python floats, one token at a time."""
    total = 0.0
    for lp, o, a, m in zip(logprobs, old, advantages, mask, strict=True):
        if m:
            ratio = math.exp(lp - o)
            total += max(-a * ratio, -a * min(max(ratio, 1 - eps), 1 + eps))
    return total / denominator


def test_policy_loss_hand_computed():
    # Ratios 1.5 and .5, eps .2. A=+1: gain clipped at 1.2. A=-1, ratio 1.5: unclipped 1.5. A=+1, .5: unclipped -.5.
    # A=-1, ratio .5: clipped at .8. A=+1, ratio 1.1: within the range.
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    loss, sums = policy_loss(logprobs, torch.zeros(5), advantages, ones(5), clip_eps=0.2, denominator=2.0)
    torch.testing.assert_close(loss, torch.tensor((-1.2 + 1.5 - 0.5 + 0.8 - 1.1) / 2))
    assert sums["clipped_tokens"] == 2
    assert sums["policy_tokens"] == 5
    torch.testing.assert_close(sums["ratio_sum"], torch.tensor(5.1))
    k3 = torch.tensor(0.1 - math.log(1.1) - 2 * math.log(1.5) - 2 * math.log(0.5))
    torch.testing.assert_close(sums["approx_kl_sum"], k3)


def test_clipped_tokens_have_no_gradient_and_the_others_minus_advantage_times_ratio():
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -3.0, 2.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    policy_loss(logprobs, torch.zeros(4), advantages, ones(4), clip_eps=0.2, denominator=1.0)[0].backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 4.5, -1.0, 0.0]))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    eps=st.sampled_from([0.05, 0.2, 0.5]),
    denominator=st.floats(1, 500),
    seed=st.integers(0, 2**20),
)
def test_policy_loss_equals_a_slow_reference(n, eps, denominator, seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, n, generator=generator)
    mask = torch.rand(n, generator=generator) > 0.3
    loss, _ = policy_loss(logprobs, old, advantages, mask, clip_eps=eps, denominator=denominator)
    expected = slow_policy_loss(logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), eps, denominator)
    # 40 fp32 terms of size up to e^6 each.
    assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_loss_and_gradient_are_finite_at_log_ratios_of_100(gap, advantage):
    logprobs = torch.tensor([gap, -0.1], requires_grad=True)
    loss, sums = policy_loss(
        logprobs, torch.zeros(2), torch.tensor([advantage, 1.0]), ones(2), clip_eps=0.2, denominator=2.0
    )
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert sums["runaway_tokens"] == 1
    assert all(total.isfinite() for total in sums.values())
    torch.testing.assert_close(logprobs.grad[1], -torch.tensor(-0.1).exp() / 2)  # its neighbour learns as before


def test_value_loss_hand_computed():
    # eps .5, old 0. v=1 -> clipped .5. Return 2: errors 1 and 2.25, the larger counts (clipped). Return -1: 4 and
    # 2.25, unclipped counts. v=.2 inside the range: .04 - one error.
    values = torch.tensor([1.0, 1.0, 0.2], requires_grad=True)
    returns = torch.tensor([2.0, -1.0, 0.0])
    loss, sums = value_loss(values, torch.zeros(3), returns, ones(3), clip_eps=0.5, denominator=4.0)
    torch.testing.assert_close(loss, torch.tensor(0.5 * (2.25 + 4 + 0.04) / 4))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 2.0, 0.2]) / 4)
    assert sums["value_clipped_tokens"] == 1
    torch.testing.assert_close(sums["value_error_sq_sum"], torch.tensor(1 + 4 + 0.04))
    torch.testing.assert_close(sums["return_sq_sum"], torch.tensor(5.0))


def test_value_clip_of_zero_never_clips():
    # Any clip would hold the first value, which has come nearer to its target of 1, back towards the old one.
    values = torch.tensor([0.75, 50.0], requires_grad=True)
    loss, sums = value_loss(values, torch.zeros(2), torch.ones(2), ones(2), clip_eps=0.0, denominator=1.0)
    assert float(loss.detach()) == pytest.approx(0.5 * (0.25**2 + 49**2))
    assert sums["value_clipped_tokens"] == 0


def test_rounding_is_not_taken_for_a_clip():
    values = torch.linspace(-3.0, 3.0, 1001)
    mask = torch.ones(1001, dtype=torch.bool)
    for clip_eps in (0.0, 10.0):
        _, sums = value_loss(values, values.flip(0) / 7, values.square(), mask, clip_eps=clip_eps, denominator=1.0)
        assert sums["value_clipped_tokens"] == 0


def test_huber_value_loss_hand_computed():
    # delta 1, eps .5, old 0. v=3, return 0: 3 - 1/2 free, 0.125 clipped at .5 -> 2.5, gradient delta. v=.2: .04 / 2.
    # v=.8, return 4: free 3.2 - .5 = 2.7, clipped (.5) 3.5 - .5 = 3, which has no gradient.
    values = torch.tensor([3.0, 0.2, 0.8], requires_grad=True)
    returns = torch.tensor([0.0, 0.0, 4.0])
    loss, sums = value_loss(values, torch.zeros(3), returns, ones(3), clip_eps=0.5, denominator=1.0, huber_delta=1.0)
    torch.testing.assert_close(loss, torch.tensor(2.5 + 0.02 + 3.0))
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([1.0, 0.2, 0.0]))
    assert sums["value_clipped_tokens"] == 1


def test_huber_without_a_clip_is_torchs():
    generator = torch.Generator().manual_seed(2)
    ours, theirs = (3 * torch.randn(40, generator=generator) for _ in range(2))
    now, other = ours.clone().requires_grad_(), ours.clone().requires_grad_()
    loss, _ = value_loss(now, ours, theirs, ones(40), clip_eps=0.0, denominator=40.0, huber_delta=1.5)
    expected = torch.nn.functional.huber_loss(other, theirs, delta=1.5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(now.grad, other.grad)


def test_entropy_and_cross_entropy_hand_computed():
    bonus, sums = entropy_bonus(torch.tensor([1.0, 2.0, NAN]), torch.tensor([True, True, False]), denominator=6.0)
    assert float(bonus) == 0.5
    assert float(sums["entropy_sum"]) == 3.0
    loss, sums = cross_entropy_loss(torch.tensor([-1.0, -4.0]), torch.tensor([True, False]), denominator=2.0)
    assert float(loss) == 0.5
    assert float(sums["nll_sum"]) == 1.0
    assert float(sums["target_tokens"]) == 1.0


CASES = {
    "policy": lambda now, x, y, m, d: policy_loss(now, x, y, m, clip_eps=0.2, denominator=d),
    "value": lambda now, x, y, m, d: value_loss(now, x, y, m, clip_eps=0.2, denominator=d),
    "huber value": lambda now, x, y, m, d: value_loss(now, x, y, m, clip_eps=0.2, denominator=d, huber_delta=0.5),
    "entropy": lambda now, x, y, m, d: entropy_bonus(now, m, denominator=d),
    "cross_entropy": lambda now, x, y, m, d: cross_entropy_loss(now, m, denominator=d),
}


@pytest.mark.parametrize("case", CASES)
def test_cutting_a_batch_changes_neither_loss_nor_gradient_nor_sums(case):
    generator = torch.Generator().manual_seed(7)
    now, x, y = torch.randn(3, 11, generator=generator)
    mask = torch.rand(11, generator=generator) > 0.4
    whole_now, parts_now = now.clone().requires_grad_(), now.clone().requires_grad_()
    whole, whole_sums = CASES[case](whole_now, x, y, mask, float(mask.sum()))
    whole.backward()
    total, total_sums = 0.0, {}
    for a, b in ((0, 0), (0, 3), (3, 4), (4, 11)):
        loss, sums = CASES[case](parts_now[a:b], x[a:b], y[a:b], mask[a:b], float(mask.sum()))
        loss.backward()
        total += float(loss.detach())
        total_sums = {key: total_sums.get(key, 0.0) + float(value) for key, value in sums.items()}
    assert total == pytest.approx(float(whole.detach()), abs=1e-5)  # fp32 sums in another order
    torch.testing.assert_close(parts_now.grad, whole_now.grad)
    for key, value in whole_sums.items():
        assert total_sums[key] == pytest.approx(float(value), abs=1e-4), key


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30])
def test_masked_tokens_take_part_in_nothing(case, rubbish):
    generator = torch.Generator().manual_seed(5)
    clean = torch.randn(3, 6, generator=generator)
    mask = torch.tensor([True, False, True, True, False, True])
    dirty = clean.clone()
    dirty[:, ~mask] = rubbish
    results = []
    for now, x, y in (clean, dirty):
        now = now.clone().requires_grad_()
        loss, sums = CASES[case](now, x, y, mask, 4.0)
        loss.backward()
        results.append((loss.detach(), now.grad, sums))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~mask].any()
    assert all(torch.equal(results[0][2][key], results[1][2][key]) for key in results[0][2])
    _, kept_sums = CASES[case](*(x[mask] for x in clean), ones(4), 4.0)
    for key, value in kept_sums.items():
        torch.testing.assert_close(results[1][2][key], value, msg=lambda text, key=key: f"{key}: {text}")


def test_an_integer_mask_is_refused():
    with pytest.raises(ShapeError, match=r"loss_mask is torch\.int64"):
        entropy_bonus(torch.zeros(2), torch.ones(2, dtype=torch.int64), denominator=1.0)
