"""Mean and variance of numbers that arrive over a whole run, on many ranks.

Unlike sums of squares, which lose digits when the mean is far from 0 and the count large, these stay accurate however
long the run. Knows no process group: ranks merge what the others tell them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared distances from the mean, in float64. `+` merges those of two parts.

    Merging is commutative and associative up to float64 rounding, and parts without values change nothing at all; so
    the result does not depend on which rank held which value.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", The American
    Statistician 37(3), the rule for two samples; one value at a time it is Welford's.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Tensor) -> "RunningMoments":
        """Of the finite ones among the values, any shape; the others are left out."""
        kept = values.detach().double()
        kept = kept[kept.isfinite()]
        if not kept.numel():
            return RunningMoments()
        mean = float(kept.mean())
        return RunningMoments(float(kept.numel()), mean, float((kept - mean).square().sum()))

    @staticmethod
    def merged(parts: Iterable["RunningMoments"]) -> "RunningMoments":
        """Of all parts, maybe none, in their order."""
        return sum(parts, RunningMoments())

    def __add__(self, other: "RunningMoments") -> "RunningMoments":
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart * apart * (self.count * other.count / count),
        )

    @property
    def variance(self) -> float:
        """Divided by count, not count - 1; 0 when there is no value."""
        return self.squares / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return self.variance**0.5
