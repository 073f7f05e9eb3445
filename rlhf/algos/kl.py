"""The divergence of the policy from the reference, per token, and the reward that it is taken from.

Rows are ragged: R = response tokens of all rows end to end, B = responses. Knows no process group.
"""

from torch import Tensor

from rlhf.algos.losses import MAX_LOG_RATIO
from rlhf.algos.shapes import check_lengths, check_same, check_tokens
from rlhf.errors import ShapeError


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, float32 [R].

    Args:
        logprobs: [R]. Of tokens that the policy sampled, by the policy.
        ref_logprobs: [R]. Of the same tokens, by the reference.
        estimator: k1 = log p - log q, unbiased, of either sign; k2 = k1^2 / 2, biased, never negative, small variance;
            k3 = q/p - 1 - log(q/p), unbiased, never negative.

    Raises:
        ShapeError: The two differ in shape.

    Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. We differ from it
    where q/p exceeds e^MAX_LOG_RATIO: there k3 stays at that bound, with no gradient, so that it is finite.
    """
    check_same("kl_estimate", logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", f"kl_estimate: estimator {estimator!r}; the config admits k1, k2, k3"
    back = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return back.expm1() - back


def token_rewards(scores: Tensor, kl: Tensor, loss_mask: Tensor, lengths: Tensor, *, kl_coef: float) -> Tensor:
    """Per-token reward, float32 [R]: minus kl_coef times the KL on each token that counts, and the score on the last.

    Args:
        scores: float32 [B]. Reward of each response. A response without tokens has nowhere to put it: it is left out.
        kl: float32 [R], of `kl_estimate`.
        loss_mask: bool [R]. True on tokens that count; the others carry no penalty.
        lengths: int64 [B] on the CPU. Tokens of each response; 0 is allowed.
        kl_coef: Weight of the penalty.

    Raises:
        ShapeError: The tensors do not fit one another.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2, spread over tokens as in arXiv:1909.08593, section 2.
    """
    check_lengths("token_rewards", lengths)
    check_same("token_rewards", kl=kl, loss_mask=loss_mask)
    check_tokens("token_rewards", lengths, kl=kl)
    if scores.shape != lengths.shape:
        raise ShapeError(f"token_rewards: scores {tuple(scores.shape)} for {lengths.numel()} rows; needs one a row")
    rewards = (-kl_coef * kl.float()).masked_fill(~loss_mask, 0.0)
    filled = lengths > 0
    last = (lengths.cumsum(0) - 1)[filled].to(kl.device)
    return rewards.index_add(0, last, scores[filled.to(scores.device)].to(kl.device, rewards.dtype))
