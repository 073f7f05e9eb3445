"""The losses of PPO as sums over tokens, divided by a denominator that the caller knows to be global.

R = response tokens of a microbatch. Each function returns its loss and sums for logs: adding losses and sums over
microbatches and ranks gives those of the whole batch, however it is cut. Knows no process group.
"""

import torch
from torch import Tensor

from rlhf.algos.shapes import check_same

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp. e^20 = 4.9e8 is far outside any clip range, so the clamp changes no
token that a sane policy produces; and sums of millions of such terms, and their gradients, stay finite in float32."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate loss.

    Args:
        logprobs: [R]. Now; the gradient flows through it.
        old_logprobs: [R]. By the trainer before the update.
        advantages: [R].
        loss_mask: bool [R]. True on tokens that count; the others may hold anything, NaN too.
        clip_eps: The ratio counts only within 1 - clip_eps .. 1 + clip_eps where it would gain by leaving that range.
        denominator: What the sum is divided by: the tokens that count in the whole minibatch, over all ranks.

    Returns:
        (loss [], sums). Sums, float32 [], no gradient: `policy_tokens` that count; `clipped_tokens` whose gradient the
        clip removed; `runaway_tokens` whose log-ratio was beyond MAX_LOG_RATIO; `ratio_sum`; `approx_kl_sum`, the k3
        estimate of KL(old || now).

    Raises:
        ShapeError: The tensors differ in shape, or the mask is not bool.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7. We differ from it beyond MAX_LOG_RATIO, where a token's
    ratio stays at the bound and gives no gradient.
    """
    check_same("policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, loss_mask=loss_mask)
    raw = counted(logprobs.float() - old_logprobs.float(), loss_mask)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    gains = counted(advantages.float(), loss_mask)
    free, clipped = -gains * ratio, -gains * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    loss = free.maximum(clipped).sum() / denominator
    sums = {
        "policy_tokens": loss_mask.sum().float(),
        "clipped_tokens": (clipped > free).sum().float(),
        "runaway_tokens": (raw.detach().abs() > MAX_LOG_RATIO).sum().float(),
        "ratio_sum": counted(ratio.detach(), loss_mask).sum(),
        "approx_kl_sum": (log_ratio.detach().expm1() - log_ratio.detach()).sum(),
    }
    return loss, sums


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float,
    denominator: float,
    huber_delta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, or Huber's, with moves away from the old values clipped.

    Args:
        values: [R]. Now; the gradient flows through it.
        old_values: [R]. By the critic before the update.
        returns: [R]. Targets.
        loss_mask: bool [R]. True on tokens that count; the others may hold anything, NaN too.
        clip_eps: New values count only within old_values +- clip_eps where they would gain by leaving; 0 never clips.
        denominator: What the sum is divided by: the tokens that count in the whole minibatch, over all ranks.
        huber_delta: Errors beyond it count by their size, d |e| - d^2 / 2, and no longer by their square, e^2 / 2; 0
            squares all.

    Returns:
        (loss [], sums). Sums, float32 [], no gradient: `value_tokens`; `value_clipped_tokens` whose gradient the clip
        removed; `value_sum`; `value_error_sq_sum`, unclipped; `return_sum` and `return_sq_sum`.

    Raises:
        ShapeError: The tensors differ in shape, or the mask is not bool.

    Source: the value clip of OpenAI baselines' ppo2, described in Huang et al., "The 37 implementation details of
    PPO" (2022), detail 9. Huber's loss for critics as in Yu et al. 2021 (MAPPO), arXiv:2103.01955, appendix.
    """
    check_same("value_loss", values=values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    now, old = counted(values.float(), loss_mask), counted(old_values.float(), loss_mask)
    target = counted(returns.float(), loss_mask)
    error, move = now - target, now - old
    reach = clip_eps if clip_eps > 0 else float("inf")
    # Inside the reach it is the same error to the bit: old + (now - old) is not, and rounding would count as a clip.
    held = torch.where(move.abs() > reach, old + move.clamp(-reach, reach) - target, error)
    free, clipped = (_doubled_penalty(e, huber_delta) for e in (error, held))
    loss = 0.5 * free.maximum(clipped).sum() / denominator
    sums = {
        "value_tokens": loss_mask.sum().float(),
        "value_clipped_tokens": (clipped > free).sum().float(),
        "value_sum": now.detach().sum(),
        "value_error_sq_sum": error.detach().square().sum(),
        "return_sum": target.sum(),
        "return_sq_sum": target.square().sum(),
    }
    return loss, sums


def _doubled_penalty(error: Tensor, huber_delta: float) -> Tensor:
    square = error.square()
    if huber_delta <= 0:
        return square
    size = error.abs()
    return torch.where(size <= huber_delta, square, huber_delta * (2 * size - huber_delta))


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, *, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Entropy of the policy over the tokens that count; the caller subtracts it, weighted, from the policy loss.

    Args:
        entropy: [R]. Of the distribution each token was drawn from; the gradient flows through it.
        loss_mask: bool [R].
        denominator: What the sum is divided by: the tokens that count in the whole minibatch, over all ranks.

    Returns:
        (bonus [], sums). Sums, float32 [], no gradient: `entropy_sum`.

    Raises:
        ShapeError: The two differ in shape, or the mask is not bool.
    """
    check_same("entropy_bonus", entropy=entropy, loss_mask=loss_mask)
    total = counted(entropy.float(), loss_mask).sum()
    return total / denominator, {"entropy_sum": total.detach()}


def cross_entropy_loss(logprobs: Tensor, loss_mask: Tensor, *, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised loss: minus the log-prob of the tokens that count.

    Args:
        logprobs: [R]. Of the target tokens; the gradient flows through it.
        loss_mask: bool [R].
        denominator: What the sum is divided by: the tokens that count in the whole minibatch, over all ranks.

    Returns:
        (loss [], sums). Sums, float32 [], no gradient: `target_tokens`; `nll_sum`.

    Raises:
        ShapeError: The two differ in shape, or the mask is not bool.
    """
    check_same("cross_entropy_loss", logprobs=logprobs, loss_mask=loss_mask)
    total = -counted(logprobs.float(), loss_mask).sum()
    return total / denominator, {"target_tokens": loss_mask.sum().float(), "nll_sum": total.detach()}


def counted(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Values with 0 where the mask is False; whatever stood there, the gradient into it is 0."""
    return values.masked_fill(~loss_mask, 0.0)
