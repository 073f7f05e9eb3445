"""Do boxes cover a tensor, each element once? In time linear in the boxes, without listing elements.

Each index of each dim gets a random number; an element's weight is their product. Boxes weigh together what the tensor
weighs if they cover it exactly, and otherwise only by an accident of one in 10^17: dims of edges, not elements.
"""

from collections.abc import Sequence

import numpy as np

from rlhf.checkpoint.store.box_index import BoxIndex, spans_of
from rlhf.errors import CheckpointError
from rlhf.reshard.layout import Box


def check_cover(where: str, key: str, shape: tuple[int, ...], boxes: Sequence[Box], *, wholly: bool = True) -> None:
    """Nothing, when the boxes cover a tensor of this shape, each element once; not `wholly`: at most once.

    Raises:
        CheckpointError: They do not; names the first box that sticks out or overlaps another, or how much is missing.
    """
    whole = Box(tuple((0, extent) for extent in shape))
    outside = next((box for box in boxes if len(box.spans) != len(shape) or not whole.contains(box)), None)
    if outside is not None:
        raise CheckpointError(
            f"{where}: {key} {list(shape)} got the block {outside.spans}; needs blocks inside it; "
            "give each block the shape of its whole tensor"
        )
    count = sum(box.num_elements for box in boxes)
    if count == whole.num_elements and _weight(boxes) == _weight([whole]):
        return
    index = BoxIndex(spans_of(boxes))
    for number, box in enumerate(boxes):
        other = next((at for at, _ in index.overlapping(box) if at != number), None)
        if other is not None:
            raise CheckpointError(
                f"{where}: blocks {boxes[other].spans} and {box.spans} of {key} {list(shape)} overlap; needs each "
                "element once; let one rank alone bring it"
            )
    if not wholly:
        return
    raise CheckpointError(
        f"{where}: {whole.num_elements - count} of {whole.num_elements} elements of {key} {list(shape)} are brought by "
        "no rank; needs each element once"
    )


def _weight(boxes: Sequence[Box]) -> int:
    """Sum of the weights of all elements, modulo 2^64."""
    spans = spans_of(boxes)
    weights = np.ones(len(boxes), dtype=np.uint64)
    for dim in range(spans.shape[1]):
        starts, stops = spans[:, dim, 0], spans[:, dim, 1]
        weights *= _place(stops, dim) - _place(starts, dim)
    return int(weights.sum(dtype=np.uint64))


def _place(edges: np.ndarray, dim: int) -> np.ndarray:
    """A hash of each edge of a dim, even for even edges: so the weight of each index between two edges is odd."""
    mixed = (edges.astype(np.uint64) + np.uint64(1)) * np.uint64(2 * dim + 0x9E3779B97F4A7C15)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return (mixed << np.uint64(1)) | (edges.astype(np.uint64) & np.uint64(1))
