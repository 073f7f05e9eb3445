"""Which token a uniform number stands for: the cuts of a distribution, and the lookup in what they leave.

All engines draw by this file, inside SGLang's schedulers too: it imports nothing but torch. torch.multinomial draws a
random number for every entry of the vocabulary instead; it was 38 % of a decoding step of the embedded engine.
Legend: V vocabulary rows (padding included, a multiple of BLOCK), N rows of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Entries of a vocabulary that are added up together, before the sums of blocks are."""
FIRST_WIDTH = 256
"""Largest entries that a nucleus is looked for among at first."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What top-k, then top-p, then min-p leave of each row's distribution; ties at a threshold all stay."""

    top_k: Tensor
    """int64 [N] or [1]: so many of the most likely tokens; anything from V on keeps all."""
    top_p: Tensor
    """float64, likewise: the smallest set with this share of what top-k leaves; 1 keeps all."""
    min_p: Tensor
    """float32, likewise: tokens at least this share as likely as the most likely one; 0 keeps all."""
    widest: int
    """Largest top_k below V; 0 where no row has one."""
    all_have_top_k: bool
    """Whether every row's top_k is below V."""
    any_top_p: bool
    """Whether some row's top_p is below 1."""
    any_min_p: bool

    @classmethod
    def alike(cls, top_k: int, top_p: float, min_p: float, vocab: int, device: torch.device) -> "Cuts":
        """The same of every row; `top_k` 0 keeps all."""
        limited = 0 < top_k < vocab
        return cls(
            top_k=torch.tensor([top_k if limited else vocab], device=device),
            top_p=torch.tensor([top_p], dtype=torch.float64, device=device),
            min_p=torch.tensor([min_p], dtype=torch.float32, device=device),
            widest=top_k if limited else 0,
            all_have_top_k=limited,
            any_top_p=top_p < 1.0,
            any_min_p=min_p > 0.0,
        )

    @property
    def keep_all(self) -> bool:
        """Whether nothing is cut of any row."""
        return not (self.widest or self.any_top_p or self.any_min_p)


def draw(weights: Tensor, sums: Tensor, uniforms: Tensor, cuts: Cuts) -> Tensor:
    """Tokens, int64 [N]: the first of each row whose cumulative weight, in vocabulary order, exceeds uniform * total.

    weights: [N, V], not negative, of any scale; `sums` are their `block_sums`.
    uniforms: float64 [N] in [0, 1).
    """
    if cuts.keep_all:
        return _inverse_cdf(weights, sums, uniforms)
    lowest = _lowest_kept(weights, sums[:, -1], cuts)
    kept = weights.masked_fill(weights < lowest.unsqueeze(1), 0.0)
    return _inverse_cdf(kept, block_sums(kept), uniforms)


def block_sums(weights: Tensor) -> Tensor:
    """Cumulative sums over whole blocks, float64 [N, V / BLOCK]; the last is the total.

    softmax(0) adds a whole vocabulary in float32, entry after entry, and is 2e-4 off at 150,000 of them.
    """
    return weights.unflatten(1, (-1, BLOCK)).sum(2).double().cumsum_(1)


def largest(values: Tensor) -> Tensor:
    """Index of the largest entry of each row of [N, V], by block and then by entry: `argmax` over all is slow."""
    blocks = values.unflatten(1, (-1, BLOCK))
    block = blocks.amax(2).argmax(1)
    return block * BLOCK + at(blocks, block).argmax(1)


def at(values: Tensor, index: Tensor) -> Tensor:
    """One entry of each row of [N, ..]; the entry may be a block."""
    return values[torch.arange(len(values), device=values.device), index]


def _inverse_cdf(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """First index of each row of [N, V] whose cumulative weight exceeds uniform * total; never one of weight 0.

    Two levels, the block and then the entry, so that only short sums run one after the other.
    """
    target = _below(uniforms * sums[:, -1], sums[:, -1])
    block = (sums <= target.unsqueeze(1)).sum(1)
    before = at(sums, (block - 1).clamp_(min=0)).where(block > 0, 0.0)
    inside = at(weights.unflatten(1, (-1, BLOCK)), block).double().cumsum_(1)
    entry = (inside <= _below(target - before, inside[:, -1]).unsqueeze(1)).sum(1)
    return block * BLOCK + entry


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Target, or the largest number below total where rounding has carried it there."""
    return torch.minimum(target, torch.nextafter(total, total.new_zeros(())))


def _lowest_kept(weights: Tensor, total: Tensor, cuts: Cuts) -> Tensor:
    """Smallest weight [N] that is not cut, of rows with these totals.

    Top-p looks at ever more of the largest entries until they hold enough: sorting a vocabulary is slow.
    """
    vocab = weights.shape[1]
    top_k, narrow = cuts.top_k.clamp(max=vocab), cuts.top_k < vocab
    width = min(vocab, max(cuts.widest, FIRST_WIDTH if cuts.any_top_p and not cuts.all_have_top_k else 1))
    while True:
        ranked = weights.topk(width, 1).values
        upto = ranked.double().cumsum_(1)
        last = top_k.clamp(max=width).expand(len(weights)) - 1
        wanted = cuts.top_p * at(upto, last).where(narrow, total)
        is_wide = width == vocab or cuts.all_have_top_k or not cuts.any_top_p  # whatever the rows hold
        if is_wide or bool((narrow | (cuts.top_p >= 1.0) | (upto[:, -1] >= wanted)).all()):
            break
        width = min(vocab, width * 16)
    count = (upto - ranked < wanted.unsqueeze(1)).sum(1)
    lowest = at(ranked, torch.minimum(count - 1, last).clamp_(min=0))
    if not cuts.any_top_p:
        lowest = at(ranked, last)
    lowest = lowest.where(narrow | (cuts.top_p < 1.0), 0.0)
    return torch.maximum(lowest, ranked[:, 0] * cuts.min_p) if cuts.any_min_p else lowest
