"""Which of many boxes of one tensor overlap a box, without looking at all of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlhf.reshard.layout import Box

Spans = npt.NDArray[np.int64]
"""[boxes, dims, 2]: first index and end of each."""


def spans_of(boxes: Sequence[Box]) -> Spans:
    """Boxes of one tensor as an array."""
    return np.array([box.spans for box in boxes], dtype=np.int64).reshape(len(boxes), -1, 2)


class BoxIndex:
    """Boxes of one tensor, sorted along each dim.

    A look-up costs the boxes that overlap the asked one along the dim where those are fewest.
    """

    def __init__(self, spans: Spans) -> None:
        self._starts, self._stops = spans[:, :, 0], spans[:, :, 1]
        self._orders = [np.argsort(starts, kind="stable") for starts in self._starts.T]
        self._sorted = [starts[order] for starts, order in zip(self._starts.T, self._orders, strict=True)]
        self._longest = (self._stops - self._starts).max(axis=0, initial=0)

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """(number of the box, what it shares with the asked one), ascending."""
        if not box.spans:  # a tensor of one element, which every box of it is
            return [(number, box) for number in range(len(self._starts))]
        found = self._near(box)
        for dim, (start, stop) in enumerate(box.spans):
            found = found[(self._starts[found, dim] < stop) & (self._stops[found, dim] > start)]
        found = np.sort(found)
        asked = np.array(box.spans, dtype=np.int64)
        lows = np.maximum(self._starts[found], asked[:, 0]).tolist()
        highs = np.minimum(self._stops[found], asked[:, 1]).tolist()
        common = (Box(tuple(zip(low, high, strict=True))) for low, high in zip(lows, highs, strict=True))
        return list(zip(found.tolist(), common, strict=True))

    def _near(self, box: Box) -> npt.NDArray[np.int64]:
        """Boxes that may overlap: those that begin in time, along the best dim."""
        ranges = []
        for dim, (start, stop) in enumerate(box.spans):
            first = np.searchsorted(self._sorted[dim], start - self._longest[dim], side="right")
            end = np.searchsorted(self._sorted[dim], stop, side="left")
            ranges.append((int(first), int(end)))
        dim = min(range(len(ranges)), key=lambda one: ranges[one][1] - ranges[one][0])
        low, high = ranges[dim]
        return self._orders[dim][low:high]
