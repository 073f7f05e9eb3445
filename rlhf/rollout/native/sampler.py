"""From logits to tokens: one uniform number a row, looked up in the cumulative distribution.

torch.multinomial draws a random number for every entry of the vocabulary instead; it was 38 % of a decoding step.
Legend: V vocabulary rows (padding included), N rows of the batch.
"""

import torch
from torch import Tensor

from rlhf.config.rollout import SamplingConfig
from rlhf.rollout.native.layout import VOCAB_MULTIPLE


def sample(logits: Tensor, vocab_size: int, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [N]) and their log-probs (float32 [N]).

    logits: [N, V], V a multiple of VOCAB_MULTIPLE, overwritten; columns from vocab_size on are padding.
    uniforms: float64 [N] in [0, 1); unused at temperature 0, which takes the most likely token.
    Log-probs are under softmax(logits / temperature), at temperature 0 under softmax(logits); the cuts by top-k and
    top-p choose among tokens but do not renormalise log-probs.
    """
    logits = logits.float()
    logits[:, vocab_size:] = float("-inf")
    if sampling.temperature not in (0.0, 1.0):
        logits.div_(sampling.temperature)
    logits.sub_(logits.amax(1, keepdim=True))
    weights = logits.exp()
    sums = _block_sums(weights)
    if sampling.temperature == 0.0:
        tokens = _largest(logits)
    elif (kept := _cut(weights, sums[:, -1], sampling)) is weights:
        tokens = _inverse_cdf(weights, sums, uniforms)
    else:
        tokens = _inverse_cdf(kept, _block_sums(kept), uniforms)
    return tokens, (_at(logits, tokens).double() - sums[:, -1].log()).float()


def _at(values: Tensor, index: Tensor) -> Tensor:
    """One entry of each row of [N, ..]; the entry may be a block."""
    return values[torch.arange(len(values), device=values.device), index]


def _block_sums(weights: Tensor) -> Tensor:
    """Cumulative sums over whole blocks, float64 [N, blocks]; the last is the total.

    softmax(0) adds a whole vocabulary in float32, entry after entry, and is 2e-4 off at 150,000 of them.
    """
    return weights.unflatten(1, (-1, VOCAB_MULTIPLE)).sum(2).double().cumsum_(1)


def _largest(logits: Tensor) -> Tensor:
    """Index of the largest entry of each row, by block and then by entry: `argmax` over a vocabulary is slow."""
    blocks = logits.unflatten(1, (-1, VOCAB_MULTIPLE))
    block = blocks.amax(2).argmax(1)
    return block * VOCAB_MULTIPLE + _at(blocks, block).argmax(1)


def _inverse_cdf(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """First index of each row of [N, V] whose cumulative weight exceeds uniform * total; never one of weight 0.

    Two levels, the block and then the entry, so that only short sums run one after the other.
    """
    target = _below(uniforms * sums[:, -1], sums[:, -1])
    block = (sums <= target.unsqueeze(1)).sum(1)
    before = _at(sums, (block - 1).clamp_(min=0)).where(block > 0, 0.0)
    inside = _at(weights.unflatten(1, (-1, VOCAB_MULTIPLE)), block).double().cumsum_(1)
    entry = (inside <= _below(target - before, inside[:, -1]).unsqueeze(1)).sum(1)
    return block * VOCAB_MULTIPLE + entry


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Target, or the largest number below total where rounding has carried it there."""
    return torch.minimum(target, torch.nextafter(total, total.new_zeros(())))


def _cut(weights: Tensor, total: Tensor, sampling: SamplingConfig) -> Tensor:
    """Weights [N, V] (totals [N]) with those outside top-k and then top-p set to 0; ties at the threshold stay."""
    vocab = weights.shape[1]
    top_k = min(sampling.top_k or vocab, vocab)
    if sampling.top_p == 1.0 and top_k == vocab:
        return weights
    if sampling.top_p == 1.0:
        lowest = weights.topk(top_k, 1).values[:, -1]
    else:
        lowest = _nucleus_threshold(weights, total, top_k, sampling.top_p)
    return weights.masked_fill(weights < lowest.unsqueeze(1), 0.0)


def _nucleus_threshold(weights: Tensor, total: Tensor, top_k: int, top_p: float) -> Tensor:
    """Smallest weight [N] of the smallest set that holds top_p of the mass of the top_k most likely.

    Without a top-k it looks at ever more of the largest entries until they hold enough: sorting a vocabulary is slow.
    """
    vocab = weights.shape[1]
    width = top_k if top_k < vocab else min(vocab, 256)
    while True:
        largest = weights.topk(width, 1).values
        cumulative = largest.double().cumsum_(1)
        wanted = top_p * (cumulative[:, -1] if top_k < vocab else total)
        if width in (top_k, vocab) or bool((cumulative[:, -1] >= wanted).all()):
            count = (cumulative - largest < wanted.unsqueeze(1)).sum(1)
            return _at(largest, (count - 1).clamp_(min=0))
        width = min(vocab, width * 16)
