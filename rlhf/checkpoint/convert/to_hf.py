"""Any checkpoint -> a Hugging Face folder: each process fills the pages of its own safetensors files."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.convert.outcome import Outcome, concluded
from rlhf.checkpoint.convert.ranks import Crew, refuse_existing
from rlhf.checkpoint.convert.sources import Wanted, Weights, common_dtype
from rlhf.families.registry import hf_config, logical_tensors, read_json, spec_of
from rlhf.families.writer import TOKEN_IDS, HfWriter
from rlhf.reshard.layout import Box

READ_BYTES = 256 * 2**20
"""Of a tensor, at a time: what a source may have to hold in memory."""


def to_hf(weights: Weights, folder: Path, crew: Crew, *, dtype: str, shard_bytes: int, overwrite: bool) -> Outcome:
    """Write the weights to `folder`, which then exists whole or not at all. Collective over the crew.

    Args:
        weights: What is converted.
        folder: What is made.
        crew: The processes; all see one file system.
        dtype: Name of a dtype to cast to; empty keeps the bits.
        shard_bytes: Upper size of a file.
        overwrite: Replace a folder that exists.

    Raises:
        CheckpointError: The folder exists, or a file of the source is damaged.
    """
    start = time.monotonic()
    kept = crew.together(lambda: common_dtype(weights, dtype))
    crew.together(lambda: refuse_existing(folder, weights.path, overwrite=overwrite))
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(weights.spec, head=weights.head)}
    writer = HfWriter(folder, shapes, dtype=kept, shard_bytes=shard_bytes, overwrite=True)
    is_whole = False
    try:
        crew.lead(writer.begin)
        crew.together(lambda: _fill(weights, writer, crew))
        crew.lead(lambda: writer.finish(model_config(weights, kept), source_folder=weights.hf_files))
        is_whole = True
    finally:
        if not is_whole and crew.leads:
            writer.abandon()
    return concluded(
        weights,
        folder,
        crew,
        folder_kind="Hugging Face folder",
        dtype=kept,
        num_bytes=sum(shard.num_bytes for shard in writer.shards),
        num_files=len(writer.shards),
        start=start,
        remarks=weights.remarks,
    )


def _fill(weights: Weights, writer: HfWriter, crew: Crew) -> None:
    for place in crew.share([shard.num_bytes for shard in writer.shards]):
        with writer.fill(writer.shards[place]) as pages:
            weights.read(_wanted(pages))


def _wanted(pages: Mapping[str, Tensor]) -> Iterator[Wanted]:
    for name, page in pages.items():
        for box in rows_of(tuple(page.shape), page.dtype.itemsize):
            yield Wanted(name, box, page[box.slices])


def rows_of(shape: tuple[int, ...], item_bytes: int, most: int = READ_BYTES) -> Iterator[Box]:
    """A tensor in blocks of whole rows, each of at most `most` bytes (or one row)."""
    row = item_bytes
    for extent in shape[1:]:
        row *= extent
    step = max(1, most // row)
    for at in range(0, shape[0], step):
        yield Box(((at, min(at + step, shape[0])), *((0, extent) for extent in shape[1:])))


def model_config(weights: Weights, dtype: torch.dtype) -> dict[str, object]:
    """The model's own config.json where there is one, for it may hold keys that only other tools know.

    Where it is of another head or other numbers, a new one with its special tokens.
    """
    name = str(dtype).removeprefix("torch.")
    made = hf_config(weights.spec, head=weights.head, dtype=name)
    if weights.hf_files is None:
        return made
    path = weights.hf_files / "config.json"
    own = read_json(path)
    if own.get("architectures") != made["architectures"] or spec_of(own, where=str(path)) != weights.spec:
        return {**made, **{key: own[key] for key in TOKEN_IDS if key in own}}
    return {**own, **{key: name for key in ("dtype", "torch_dtype") if key in own}}
