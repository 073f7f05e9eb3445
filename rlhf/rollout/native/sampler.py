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
    probs = logits.softmax(0)
    tokens = logits.argmax(0) if sampling.temperature == 0.0 else _inverse_cdf(_cut(probs, sampling), uniforms)
    return tokens, probs.gather(0, tokens.unsqueeze(0)).squeeze(0).log()


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First index of [V, N] whose cumulative weight exceeds uniform * total; never one of weight 0.

    Two levels, the block and then the entry, so that only short sums run one after the other.
    """
    blocks = weights.unflatten(0, (-1, VOCAB_MULTIPLE))
    sums = blocks.sum(1).double().cumsum_(0)
    target = _below(uniforms * sums[-1], sums[-1])
    block = (sums <= target).sum(0)
    before = sums.gather(0, (block - 1).clamp_(min=0).unsqueeze(0)).squeeze(0).where(block > 0, 0.0)
    inside = blocks.gather(0, block.view(1, 1, -1).expand(1, VOCAB_MULTIPLE, -1)).squeeze(0).double().cumsum_(0)
    entry = (inside <= _below(target - before, inside[-1])).sum(0)
    return block * VOCAB_MULTIPLE + entry


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Target, or the largest number below total where rounding has carried it there."""
    return torch.minimum(target, torch.nextafter(total, total.new_zeros(())))


def _cut(probs: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities [V, N] with those outside top-k and then top-p set to 0; ties at the threshold stay."""
    vocab = probs.shape[0]
    top_k = min(sampling.top_k or vocab, vocab)
    if sampling.top_p == 1.0 and top_k == vocab:
        return probs
    if sampling.top_p == 1.0:
        lowest = probs.topk(top_k, 0).values[-1]
    else:
        lowest = _nucleus_threshold(probs, top_k, sampling.top_p)
    return probs.masked_fill(probs < lowest, 0.0)


def _nucleus_threshold(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Smallest probability [N] of the smallest set that holds top_p of the mass of the top_k most likely.

    Without a top-k it looks at ever more of the largest entries until they hold enough: sorting a vocabulary is slow.
    """
    vocab = probs.shape[0]
    width = top_k if top_k < vocab else min(vocab, 256)
    while True:
        largest = probs.topk(width, 0).values
        cumulative = largest.double().cumsum_(0)
        wanted = top_p * (cumulative[-1] if top_k < vocab else probs.sum(0, dtype=torch.float64))
        if width in (top_k, vocab) or bool((cumulative[-1] >= wanted).all()):
            count = (cumulative - largest < wanted).sum(0)
            return largest.gather(0, (count - 1).clamp_(min=0).unsqueeze(0)).squeeze(0)
        width = min(vocab, width * 16)
