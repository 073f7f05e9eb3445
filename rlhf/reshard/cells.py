"""Index sets of blocks, counted exactly without listing elements: the space is cut at every edge of every block."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rlhf.reshard.layout import Box


class Cells:
    """The finest grid in which each of some blocks is a whole number of cells."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        dims = len(boxes[0].spans)
        self._edges = [sorted({edge for box in boxes for edge in box.spans[dim]}) for dim in range(dims)]
        self._at = [{edge: at for at, edge in enumerate(edges)} for edges in self._edges]
        self._shape = tuple(len(edges) - 1 for edges in self._edges)

    def count(self, boxes: Iterable[Box]) -> npt.NDArray[np.int64]:
        """How many of the blocks cover each cell."""
        counted = np.zeros(self._shape, dtype=np.int64)
        for box in boxes:
            counted[tuple(slice(at[a], at[b]) for at, (a, b) in zip(self._at, box.spans, strict=True))] += 1
        return counted

    def elements(self, chosen: npt.NDArray[np.bool_]) -> int:
        """Elements in the chosen cells."""
        sizes = np.ones((1,) * len(self._shape), dtype=np.int64)
        for dim, edges in enumerate(self._edges):
            along = [1] * len(self._shape)
            along[dim] = -1
            sizes = sizes * np.diff(np.array(edges, dtype=np.int64)).reshape(along)
        return int(sizes[chosen].sum())
