"""A few tensors cut into blocks in ways that no grid is; blocks written to a data file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.store.data_file import WrittenFile, streamed, write_data_file
from rlhf.checkpoint.store.file_plan import ITEM_BYTES, plan_file
from rlhf.reshard.block import Block
from rlhf.reshard.layout import Box

SHAPES = {
    "decoder.stacked.weight": (4, 6, 10),
    "embedding.weight": (16, 7),
    "final_norm.weight": (12,),
    "optimizer.exp_avg.embedding.weight": (16, 7),
}
DTYPES = {"embedding.weight": torch.bfloat16}


def tensors(seed: int = 3) -> dict[str, Tensor]:
    """Elements of each stored tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=generator).to(DTYPES.get(key, torch.float32)) for key, shape in SHAPES.items()
    }


def block(held: dict[str, Tensor], key: str, *spans: tuple[int, int]) -> Block:
    """A box of a tensor, as a view of it."""
    box = Box(spans)
    return Block(key, SHAPES[key], box, held[key][box.slices])


def wholes(held: dict[str, Tensor]) -> list[Block]:
    """Each tensor as one block."""
    return [block(held, key, *((0, extent) for extent in SHAPES[key])) for key in held]


def uneven_shares(held: dict[str, Tensor]) -> tuple[list[Block], list[Block]]:
    """What two ranks write: each element once, boxes of all sizes, one tensor on one rank alone.

    The last tensor is cut like flat ranges of a 2-D parameter: 100 elements from element 0 to 40, and the rest.
    """
    stacked, moment = "decoder.stacked.weight", "optimizer.exp_avg.embedding.weight"
    first = [
        block(held, stacked, (0, 1), (0, 6), (0, 10)),
        block(held, stacked, (1, 4), (0, 5), (0, 3)),
        block(held, "embedding.weight", (0, 9), (0, 7)),
        block(held, moment, (0, 5), (0, 7)),
        block(held, moment, (5, 6), (0, 5)),
    ]
    second = [
        block(held, stacked, (1, 4), (0, 5), (3, 10)),
        block(held, stacked, (1, 4), (5, 6), (0, 10)),
        block(held, "embedding.weight", (9, 16), (0, 7)),
        block(held, moment, (5, 6), (5, 7)),
        block(held, moment, (6, 16), (0, 7)),
        block(held, "final_norm.weight", (0, 12)),
    ]
    return first, second


def write_file(path: Path, blocks: Sequence[Block], *, item_bytes: int = ITEM_BYTES) -> WrittenFile:
    """One rank's blocks in a data file that must not exist yet."""
    plan = plan_file(blocks, item_bytes=item_bytes)
    return write_data_file(path.parent, path.name, plan, streamed(plan, blocks))
