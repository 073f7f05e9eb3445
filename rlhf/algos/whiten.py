"""Values brought to mean 0 and variance 1 over a batch that may lie on many ranks.

Each rank takes the `Moments` of its own values, the owners add them up (three numbers), each rank whitens its own.
R = response tokens on this rank. Knows no process group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algos.shapes import check_same


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares, in float64: adding those of parts gives those of the whole."""

    count: float
    total: float
    total_sq: float

    @staticmethod
    def of(values: Tensor, loss_mask: Tensor) -> "Moments":
        """Of the values [R] where the mask (bool [R]) is True.

        Raises:
            ShapeError: The two differ in shape, or the mask is not bool.
        """
        check_same("Moments.of", values=values, loss_mask=loss_mask)
        kept = values.detach()[loss_mask].double()
        return Moments(float(kept.numel()), float(kept.sum()), float(kept.square().sum()))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.total_sq + other.total_sq)

    def to_tensor(self) -> Tensor:
        """float64 [3], to be summed over ranks."""
        return torch.tensor([self.count, self.total, self.total_sq], dtype=torch.float64)

    @staticmethod
    def from_tensor(summed: Tensor) -> "Moments":
        """Inverse of to_tensor."""
        return Moments(*summed.tolist())

    @property
    def mean(self) -> float:
        """0 when there is no value."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Mean squared distance from the mean (divided by count, not count - 1); 0 when there is no value."""
        return max(self.total_sq / self.count - self.mean**2, 0.0) if self.count else 0.0


def whiten(values: Tensor, loss_mask: Tensor, moments: Moments, *, eps: float = 1e-8) -> Tensor:
    """(value - mean) / sqrt(variance + eps) where the mask is True, 0 elsewhere; float32 [R].

    eps keeps a batch of equal values at 0 instead of 0/0.

    Raises:
        ShapeError: Values and mask differ in shape, or the mask is not bool.
    """
    check_same("whiten", values=values, loss_mask=loss_mask)
    scaled = (values.double() - moments.mean) / (moments.variance + eps) ** 0.5
    return scaled.masked_fill(~loss_mask, 0.0).float()
