"""From the score of a response to the reward that is learned from: penalties on length, normalisation.

B = responses on this rank. Knows no process group: moments over ranks arrive as numbers.
"""

import torch
from torch import Tensor

from rlhf.errors import ShapeError

EPS = 1e-8
"""Added to a variance, so that equal rewards become 0 instead of 0/0."""


def short_penalty(lengths: Tensor, *, min_tokens: int, penalty: float) -> Tensor:
    """float32 [B], to be added to the score: -penalty where lengths (int64 [B]) < min_tokens, else 0."""
    return torch.where(lengths < min_tokens, -penalty, 0.0)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, cache_tokens: int, penalty: float) -> Tensor:
    """float32 [B], to be added to the score: the longer a response beyond a free length, the more is taken off.

    0 up to max_tokens - cache_tokens, then a line down to -penalty at max_tokens, and -penalty beyond.

    Args:
        lengths: int64 [B]. Tokens of each response.
        max_tokens: L_max of the source.
        cache_tokens: L_cache of the source; 0 makes it a step: nothing up to max_tokens, all of it beyond.
        penalty: Most that is taken off; 1 in the source.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    over = (lengths - (max_tokens - cache_tokens)).clamp(min=0).float()
    return -penalty * (over / max(cache_tokens, 1)).clamp(max=1.0)


def standardised(values: Tensor, *, mean: float, variance: float) -> Tensor:
    """(value - mean) / sqrt(variance + EPS), float32 [B], for moments over the batch or the whole run."""
    return ((values.double() - mean) / (variance + EPS) ** 0.5).float()


def group_standardised(values: Tensor, counts: Tensor, groups: Tensor) -> Tensor:
    """Each value by the mean and variance of its own group, float32 [B].

    Args:
        values: float32 [B].
        counts: bool [B]. False values take part in no group and give 0.
        groups: int64 [B]. Equal for values of one group, such as the samples of one prompt; all on this rank.

    A group of one value, or of equal values, gives 0. The variance is divided by the group's size.

    Raises:
        ShapeError: The three differ in shape.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2.
    """
    if not values.shape == counts.shape == groups.shape:
        raise ShapeError(
            f"group_standardised: values {tuple(values.shape)}, counts {tuple(counts.shape)}, groups "
            f"{tuple(groups.shape)}; needs one common [B]"
        )
    _, group = groups.unique(return_inverse=True)
    kept = values.double().masked_fill(~counts, 0.0)
    size = _sums(counts.double(), group).clamp(min=1.0)
    centred = (kept - (_sums(kept, group) / size)[group]).masked_fill(~counts, 0.0)
    variance = _sums(centred.square(), group) / size
    return (centred / (variance + EPS).sqrt()[group]).float()


def _sums(values: Tensor, group: Tensor) -> Tensor:
    """Sum of each group, at the place of its number."""
    return torch.zeros(len(values), dtype=values.dtype).index_add_(0, group, values)
