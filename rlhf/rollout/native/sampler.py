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

    logits: [V, N], V a multiple of VOCAB_MULTIPLE; rows from vocab_size on are padding and are overwritten.
    uniforms: float64 [N] in [0, 1); unused at temperature 0, which takes the most likely token.
    Log-probs are under softmax(logits / temperature), at temperature 0 under softmax(logits); the cuts by top-k and
    top-p choose among tokens but do not renormalise log-probs.
    """
    logits = logits.float()
    logits[vocab_size:] = float("-inf")
    if sampling.temperature not in (0.0, 1.0):
        logits.div_(sampling.temperature)
    logits.sub_(logits.amax(0))
    weights = logits.exp()
    sums = _block_sums(weights)
    if sampling.temperature == 0.0:
        tokens = _largest(logits)
    elif (kept := _cut(weights, sums[-1], sampling)) is weights:
        tokens = _inverse_cdf(weights, sums, uniforms)
    else:
        tokens = _inverse_cdf(kept, _block_sums(kept), uniforms)
    return tokens, (logits.gather(0, tokens.unsqueeze(0)).squeeze(0).double() - sums[-1].log()).float()


def _block_sums(weights: Tensor) -> Tensor:
    """Cumulative sums over whole blocks, float64 [blocks, N]; the last is the total.

    A block is added up by a matrix product, since the order in which `sum` adds depends on N; softmax(0) adds a whole
    vocabulary in float32, entry after entry, and is 2e-4 off at 150,000 of them.
    """
    ones = weights.new_ones(1, VOCAB_MULTIPLE)
    return torch.matmul(ones, weights.unflatten(0, (-1, VOCAB_MULTIPLE))).squeeze(1).double().cumsum_(0)


def _largest(logits: Tensor) -> Tensor:
    """Index of the largest entry of each column, by block and then by entry: `argmax` over dim 0 is slow."""
    blocks = logits.unflatten(0, (-1, VOCAB_MULTIPLE))
    block = blocks.amax(1).argmax(0)
    return block * VOCAB_MULTIPLE + _of_block(blocks, block).argmax(0)


def _of_block(blocks: Tensor, block: Tensor) -> Tensor:
    """The entries [VOCAB_MULTIPLE, N] of one block of each column."""
    return blocks.gather(0, block.view(1, 1, -1).expand(1, VOCAB_MULTIPLE, -1)).squeeze(0)


def _inverse_cdf(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """First index of [V, N] whose cumulative weight exceeds uniform * total; never one of weight 0.

    Two levels, the block and then the entry, so that only short sums run one after the other.
    """
    target = _below(uniforms * sums[-1], sums[-1])
    block = (sums <= target).sum(0)
    before = sums.gather(0, (block - 1).clamp_(min=0).unsqueeze(0)).squeeze(0).where(block > 0, 0.0)
    inside = _of_block(weights.unflatten(0, (-1, VOCAB_MULTIPLE)), block).double().cumsum_(0)
    entry = (inside <= _below(target - before, inside[-1])).sum(0)
    return block * VOCAB_MULTIPLE + entry


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Target, or the largest number below total where rounding has carried it there."""
    return torch.minimum(target, torch.nextafter(total, total.new_zeros(())))


def _cut(weights: Tensor, total: Tensor, sampling: SamplingConfig) -> Tensor:
    """Weights [V, N] (totals [N]) with those outside top-k and then top-p set to 0; ties at the threshold stay."""
    vocab = weights.shape[0]
    top_k = min(sampling.top_k or vocab, vocab)
    if sampling.top_p == 1.0 and top_k == vocab:
        return weights
    if sampling.top_p == 1.0:
        lowest = weights.topk(top_k, 0).values[-1]
    else:
        lowest = _nucleus_threshold(weights, total, top_k, sampling.top_p)
    return weights.masked_fill(weights < lowest, 0.0)


def _nucleus_threshold(weights: Tensor, total: Tensor, top_k: int, top_p: float) -> Tensor:
    """Smallest weight [N] of the smallest set that holds top_p of the mass of the top_k most likely.

    Without a top-k it looks at ever more of the largest entries until they hold enough: sorting a vocabulary is slow.
    """
    vocab = weights.shape[0]
    width = top_k if top_k < vocab else min(vocab, 256)
    while True:
        largest = weights.topk(width, 0).values
        cumulative = largest.double().cumsum_(0)
        wanted = top_p * (cumulative[-1] if top_k < vocab else total)
        if width in (top_k, vocab) or bool((cumulative[-1] >= wanted).all()):
            count = (cumulative - largest < wanted).sum(0)
            return largest.gather(0, (count - 1).clamp_(min=0).unsqueeze(0)).squeeze(0)
        width = min(vocab, width * 16)
