"""Log-probs of target tokens and entropy under an output layer whose vocabulary is cut over a group of ranks.

Logits exist for one chunk of tokens at a time, in the forward pass and again in the backward pass, unless they are
kept. Knows tensors and a process group, nothing of Megatron. Shape letters: R = predicted tokens, H = hidden size, V =
vocabulary rows of this rank, C = tokens of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from rlhf.errors import ConfigError, ShapeError

CHUNK_ELEMENTS = 2**23
"""Logits of one chunk when the caller does not say how many tokens: 32 MiB in fp32. Each chunk reads the whole weight
and adds to its whole gradient; larger chunks leave the caches."""
KEPT_ELEMENTS = 2**27
"""Logits that are kept for the backward pass when the caller does not say: up to 512 MiB in fp32."""


def chunk_tokens_for(vocab_rows: int) -> int:
    """Tokens of a chunk such that its logits have about CHUNK_ELEMENTS elements, at least 16."""
    return max(16, CHUNK_ELEMENTS // max(1, vocab_rows))


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: ProcessGroup | None,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    keep_logits: bool = False,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of targets and entropy of softmax(hidden @ weight^T / temperature), both [R].

    They are float32, or float64 for float64 inputs.

    Collective over `tp_group` in the forward pass (two small all-reduces whatever the number of chunks), silent in the
    backward pass. None or a group of one rank means that the whole vocabulary is here.

    Args:
        hidden: [R, H], the same on all ranks of the group. Its gradient is this rank's part of a sum over the group:
            the operation that gave `hidden` must reduce it (Megatron's gather with tensor_parallel_output_grad does).
        weight: [V, H], rows rank * V .. (rank + 1) * V - 1 of the padded output layer.
        targets: int64 [R], below vocab_size.
        tp_group: Ranks among which the vocabulary is cut.
        vocab_size: Rows from here on, in the whole layer, are padding: outside every sum, with gradient exactly 0.
        temperature: Divides the logits.
        chunk_tokens: Tokens whose logits exist at one time.
        keep_logits: Keep all logits, [R, V], for the backward pass: a quarter less work.
        with_entropy: False leaves out two of five passes over the logits where no gradient is wanted; the entropy is
            then NaN.

    Returns:
        (logprobs, entropy). Both are differentiable; an entropy that takes no part in the loss, or with weight 0, costs
        nothing in the backward pass.

    Raises:
        ShapeError: The three tensors do not fit together.
        ConfigError: temperature or chunk_tokens is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or len(hidden) != targets.numel():
        raise ShapeError(
            f"vocab_parallel_logprobs: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}; needs [R, H], [V, H] and [R]"
        )
    if temperature <= 0 or chunk_tokens < 1:
        raise ConfigError(
            f"vocab_parallel_logprobs: temperature {temperature}, chunk_tokens {chunk_tokens}; needs both above 0"
        )
    group = None if tp_group is None or tp_group.size() == 1 else tp_group
    first_row = 0 if group is None else dist.get_rank(group) * len(weight)
    num_rows = min(max(vocab_size - first_row, 0), len(weight))
    keep_logits &= torch.is_grad_enabled()
    numbers = (first_row, num_rows, temperature, chunk_tokens)
    logprobs, entropy = _LogProbs.apply(hidden, weight, targets, *numbers, keep_logits, with_entropy, group)
    return logprobs, entropy if with_entropy else torch.full_like(entropy, torch.nan)


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, length)) for at in range(0, length, size))


def _wide(tensor: Tensor) -> torch.dtype:
    """Of sums: float32, or float64 for float64 inputs (which tests of gradients use)."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(hidden_CH: Tensor, rows_VH: Tensor, temperature: float) -> Tensor:
    """[C, V] in the wide dtype, for the caller to overwrite."""
    logits_CV = (hidden_CH @ rows_VH.T).to(_wide(hidden_CH))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_row: int,
        num_rows: int,
        temperature: float,
        chunk_tokens: int,
        keep_logits: bool,
        with_entropy: bool,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows_VH = weight[:num_rows]
        # Of this rank's logits z: the maximum m; sums of exp(z - m) and of exp(z - m) (z - m); the target's z.
        peak_R = hidden.new_full((len(hidden),), -torch.inf, dtype=_wide(hidden))
        sums_3R = hidden.new_zeros((3, len(hidden)), dtype=_wide(hidden))
        local_R = targets - first_row
        here_R = (local_R >= 0) & (local_R < num_rows)
        local_R = local_R.clamp(0, max(num_rows - 1, 0))
        num_tokens = len(hidden) if num_rows else 0
        kept_RV = _logits(hidden, rows_VH, temperature) if keep_logits and num_tokens else None
        for chunk in _chunks(num_tokens, chunk_tokens):
            z_CV = _logits(hidden[chunk], rows_VH, temperature) if kept_RV is None else kept_RV[chunk]
            picked_C = z_CV.gather(1, local_R[chunk, None])[:, 0]
            sums_3R[2, chunk] = picked_C.masked_fill_(~here_R[chunk], 0.0)
            peak_R[chunk] = z_CV.amax(1)
            z_CV.sub_(peak_R[chunk, None])
            exp_CV = z_CV.exp() if with_entropy or kept_RV is not None else z_CV.exp_()
            sums_3R[0, chunk] = exp_CV.sum(1)
            if with_entropy:
                sums_3R[1, chunk] = exp_CV.mul_(z_CV).sum(1)
            del z_CV, exp_CV  # or they outlive the next chunk's logits
        ctx.kept_RV, ctx.kept_peak_R = kept_RV, peak_R
        if group is not None:
            peak_R = _merge(peak_R, sums_3R, group)
        logsumexp_R = peak_R + sums_3R[0].log()
        entropy_R = sums_3R[0].log() - sums_3R[1] / sums_3R[0]
        ctx.save_for_backward(hidden, weight, local_R, here_R, logsumexp_R, entropy_R)
        ctx.num_rows, ctx.temperature, ctx.chunk_tokens = num_rows, temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return sums_3R[2] - logsumexp_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        hidden, weight, local_R, here_R, logsumexp_R, entropy_R = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logsumexp_R)
        if grad_entropy is not None and not grad_entropy.any():
            grad_entropy = None
        rows_VH = weight[: ctx.num_rows]
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over chunks in fp32, also for bf16 weights: 16 chunks of rounding would show.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        kept_RV, ctx.kept_RV = ctx.kept_RV, None  # overwritten below: a second backward pass computes them again
        num_tokens = len(hidden) if ctx.num_rows else 0
        for block in _chunks(num_tokens, ctx.chunk_tokens if kept_RV is None else num_tokens):
            if kept_RV is None:
                logits_CV, shift_C = _logits(hidden[block], rows_VH, ctx.temperature), logsumexp_R[block]
            else:
                logits_CV, shift_C = kept_RV, logsumexp_R - ctx.kept_peak_R
            for part in _chunks(len(logits_CV), ctx.chunk_tokens):
                tokens = slice(block.start + part.start, block.start + part.stop)
                up_C = grad_logprobs[tokens, None]
                grad_up_C = None if grad_entropy is None else grad_entropy[tokens, None]
                _to_gradient_(logits_CV[part].sub_(shift_C[part, None]), up_C, grad_up_C, entropy_R[tokens, None])
                logits_CV[part].scatter_add_(1, local_R[tokens, None], up_C * here_R[tokens, None])
            if ctx.temperature != 1.0:
                logits_CV.div_(ctx.temperature)
            grad_CV = logits_CV.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, rows_VH, out=grad_hidden[block])
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.num_rows], grad_CV.T, hidden[block])
            del logits_CV, grad_CV
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None, None


def _to_gradient_(logp_CV: Tensor, up_C: Tensor, up_entropy_C: Tensor | None, entropy_C: Tensor) -> None:
    """Log-probs become the loss's gradient by the logits, but for the target's own term.

    d logprob / dz_j = 1[j = target] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy)
    """
    if up_entropy_C is None:
        logp_CV.exp_().mul_(-up_C)
        return
    probs_CV = logp_CV.exp()
    logp_CV.add_(entropy_C).mul_(up_entropy_C).add_(up_C).neg_().mul_(probs_CV)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _merge(peak_R: Tensor, sums_3R: Tensor, group: ProcessGroup) -> Tensor:
    """Turn local sums into sums over the group, relative to the common maximum, which is returned."""
    common_R = peak_R.clone()
    dist.all_reduce(common_R, op=dist.ReduceOp.MAX, group=group)
    shift_R = (peak_R - common_R).clamp_(min=-1e30)  # a rank of padded rows only has peak -inf and sums 0
    scale_R = shift_R.exp()
    sums_3R[1].add_(shift_R * sums_3R[0]).mul_(scale_R)
    sums_3R[0].mul_(scale_R)
    dist.all_reduce(sums_3R, group=group)
    return common_R
