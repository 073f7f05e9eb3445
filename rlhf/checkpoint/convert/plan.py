"""Which blocks of the stored tensors lie in which file of a converted checkpoint, and which weights they are made of.

A file for each rank of the target layout, so that a rank which loads that layout reads its own file and little else;
every element lies in one file. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.stored import StoredPiece, held_of_stored, stored_pieces, stored_shapes
from rlhf.reshard.layout import Box

CHUNK_BYTES = 256 * 2**20
"""Upper size of a block: what is in memory at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a logical tensor inside a chunk."""

    tensor: str
    box: Box
    """In the logical tensor's indices."""
    place: Box
    """In the chunk's indices: of as many dims as the stored tensor has."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a stored tensor and what it is made of; its parts fill it."""

    key: str
    shape: tuple[int, ...]
    """Of the whole stored tensor."""
    box: Box
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """What one file holds."""

    rank: int
    """Of the target layout; the first that holds these blocks."""
    chunks: tuple[Chunk, ...]

    @property
    def num_elements(self) -> int:
        """Of all chunks."""
        return sum(chunk.box.num_elements for chunk in self.chunks)


def target_layout(
    *, tp: int, pp: int, vpp: int, ep: int, etp: int, layers_per_stage: tuple[int, ...] = ()
) -> ParallelConfig:
    """The layout with as few replicas as its experts admit: tp*dp ranks of a stage share them.

    Raises:
        ConfigError: The sizes cannot go together.
    """
    dp = ep * etp // gcd(tp, ep * etp)
    return ParallelConfig(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, layers_per_stage=layers_per_stage)


def plan_files(
    spec: ModelSpec, parallel: ParallelConfig, *, head: Head, item_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[PlannedFile, ...]:
    """All files of a checkpoint of the model; together they hold each stored element once.

    Args:
        spec: The model.
        parallel: The layout it will be loaded in first; any other can read the files too.
        head: What the model's last tensor is.
        item_bytes: Of a stored element.
        chunk_bytes: Upper size of a chunk.

    Raises:
        LayoutError: Its parameters cannot be cut so.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    shapes, made_of = stored_shapes(spec, head=head), _by_place(spec, head)
    files, seen = [], set()
    for rank in parallel.ranks:
        chunks = []
        for held in held_of_stored(spec, parallel, head=head, rank=rank, without_replicas=True, for_files=True):
            box = held.stored_box(held.box)
            if (held.key, box) in seen:  # replicas over dp, and of experts over edp
                continue
            seen.add((held.key, box))
            pieces = made_of[held.key, held.lead]
            for cut in _cut(box, len(held.lead), chunk_bytes // item_bytes):
                chunks.append(Chunk(held.key, shapes[held.key], cut, tuple(_parts(cut, pieces))))
        if chunks:
            files.append(PlannedFile(rank, tuple(chunks)))
    return tuple(files)


def logical_box(piece: StoredPiece, stored: Box) -> Box:
    """The block of the logical tensor that lies in a box of the stored one (inside the piece): undoes `stored_box`."""
    at = piece.stored_box(piece.box)
    back = tuple(own - there for (own, _), (there, _) in zip(piece.box.spans, _tail(at, piece), strict=True))
    return Box(_tail(stored, piece)).shift(back)


def _tail(stored: Box, piece: StoredPiece) -> tuple[tuple[int, int], ...]:
    return stored.spans[len(piece.lead) :]


def _by_place(spec: ModelSpec, head: Head) -> dict[tuple[str, tuple[int, ...]], list[StoredPiece]]:
    found: dict[tuple[str, tuple[int, ...]], list[StoredPiece]] = {}
    for piece in stored_pieces(spec, head=head):
        found.setdefault((piece.key, piece.lead), []).append(piece)
    return found


def _parts(chunk: Box, pieces: list[StoredPiece]) -> Iterator[Part]:
    to_chunk = tuple(-start for start, _ in chunk.spans)
    for piece in pieces:
        common = chunk.intersect(piece.stored_box(piece.box))
        if common is not None:
            yield Part(piece.tensor, logical_box(piece, common), common.shift(to_chunk))


def _cut(box: Box, num_lead: int, most: int) -> Iterator[Box]:
    """A block as blocks of at most `most` elements, whole rows each (the dim after the leading ones)."""
    start, stop = box.spans[num_lead]
    rows = max(1, most // max(1, prod(box.shape[num_lead + 1 :])))
    for at in range(start, stop, rows):
        yield Box((*box.spans[:num_lead], (at, min(at + rows, stop)), *box.spans[num_lead + 1 :]))
