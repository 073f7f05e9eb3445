"""Any checkpoint -> a folder that Megatron-LM loads: torch_dist files, a file for each rank of the target layout.

OUT/latest_checkpointed_iteration.txt    "release": weights that no training has touched
OUT/release/                             the distributed checkpoint
OUT/config.json, tokenizer.json, ...     of the Hugging Face folder, so that the way back needs no original
OUT/conversion.json, manifest.json       what was converted; every file's size and checksum
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.convert.files import complete
from rlhf.checkpoint.convert.megatron_args import common_state, megatron_args
from rlhf.checkpoint.convert.options import LAYOUT
from rlhf.checkpoint.convert.outcome import Outcome, concluded
from rlhf.checkpoint.convert.places import RELEASE
from rlhf.checkpoint.convert.plan import Part, PlannedFile, plan_files
from rlhf.checkpoint.convert.ranks import Crew, appearing
from rlhf.checkpoint.convert.sources import Place, Remark, Wanted, Weights, common_dtype
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.checkpoint.store.data_file import Room, WrittenFile, elements, put_texts, write_data_file
from rlhf.checkpoint.store.file_plan import FilePlan, Window, plan_file
from rlhf.checkpoint.store.torch_dist import data_file_name, write_metadata
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import LayoutError
from rlhf.families.admissible import check_layout
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.families.spec import Part as Of
from rlhf.mcore.stored import extra_state_keys
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import inside, wrapped
from rlhf.reshard.layout import Box


def to_megatron(
    weights: Weights, folder: Path, crew: Crew, *, parallel: ParallelConfig, dtype: str, overwrite: bool
) -> Outcome:
    """Write the weights to `folder`, which then exists whole or not at all. Collective over the crew.

    Args:
        weights: What is converted.
        folder: What is made.
        crew: The processes; all see one file system.
        parallel: The layout that has a file for each of its ranks; any other can load the folder too.
        dtype: Name of a dtype to cast to; empty keeps the bits.
        overwrite: Replace a folder that exists.

    Raises:
        CheckpointError: The folder exists, or a file of the source is damaged.
        LayoutError: Parameters cannot be cut so; that tp divides the number of heads is not asked.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    start = time.monotonic()
    kept = crew.together(lambda: common_dtype(weights, dtype))
    files = crew.together(lambda: plan_files(weights.spec, parallel, head=weights.head, item_bytes=kept.itemsize))
    with appearing(folder, weights.path, crew, overwrite=overwrite) as partial:
        inner = partial / RELEASE
        crew.lead(inner.mkdir)
        places = crew.share([file.num_elements for file in files])
        mine = crew.together(lambda: [_write(weights, inner, files[place], kept) for place in places])
        written = sorted((one for part in crew.all(mine) for one in part), key=lambda one: one.name)
        crew.lead(lambda: _complete(weights, partial, written, parallel=parallel, dtype=kept, num_ranks=crew.size))
    return concluded(
        weights,
        folder,
        crew,
        folder_kind=f"Megatron torch_dist, {said(parallel)}",
        dtype=kept,
        num_bytes=sum(file.num_elements for file in files) * kept.itemsize,
        num_files=len(files),
        start=start,
        remarks=(*weights.remarks, *replicated(weights.spec, parallel, head=weights.head)),
        note=_note(weights.spec, parallel),
    )


def _note(spec: ModelSpec, parallel: ParallelConfig) -> str:
    """That no model has the layout of the files, where that is so."""
    try:
        check_layout(spec, parallel, where="parallel")
    except LayoutError as error:
        return f"no model can be built in this layout ({error}); the files load in any other"
    return ""


def said(parallel: ParallelConfig) -> str:
    """A layout in one word, without the sizes that are 1."""
    sizes = {name: getattr(parallel, name) for name in LAYOUT}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def replicated(spec: ModelSpec, parallel: ParallelConfig, *, head: Head) -> tuple[Remark, ...]:
    """Tensors that several ranks of a layout hold whole, dp left aside."""
    found = []
    for tensor in logical_tensors(spec, head=head):
        if parallel.tp > 1 and tensor.part in _WHOLE:
            found.append(Remark(Place.REPLICATED, tensor.name, "whole on each tp rank"))
        elif parallel.pp > 1 and tensor.part is Of.EMBED and spec.tied_embeddings and head is Head.LM:
            found.append(Remark(Place.REPLICATED, tensor.name, "on the first and the last pipeline stage"))
    return tuple(found)


_WHOLE = {Of.ATTN_NORM, Of.MLP_NORM, Of.FINAL_NORM, Of.Q_NORM, Of.K_NORM, Of.ROUTER, Of.VALUE_HEAD}


def planned_items(file: PlannedFile, dtype: torch.dtype) -> FilePlan:
    """Where what lies in a file."""
    blocks = [
        Block(chunk.key, chunk.shape, chunk.box, torch.empty(chunk.box.shape, dtype=dtype, device="meta"))
        for chunk in file.chunks
    ]
    return plan_file(blocks)


def _write(weights: Weights, folder: Path, file: PlannedFile, dtype: torch.dtype) -> WrittenFile:
    """One data file, a window of a few MiB after the other."""
    plan = planned_items(file, dtype)
    return write_data_file(folder, data_file_name(file.rank), plan, _source(weights, file, plan))


def _source(weights: Weights, file: PlannedFile, plan: FilePlan) -> Callable[[Window], Tensor]:
    room = Room(plan)

    def content(window: Window) -> Tensor:
        memory, wanted = room.of(window), []
        put_texts(window, memory)
        for band in window.bands:
            chunk = file.chunks[band.block]
            block = elements(window, band, memory)
            for part in chunk.parts:
                wanted += _wanted(part, chunk.box, band.box, block)
        weights.read(wanted)
        return memory

    return content


def _wanted(part: Part, chunk: Box, band: Box, block: Tensor) -> list[Wanted]:
    """What a band takes of a part of its chunk: at most one block, and none where they share nothing."""
    there = part.place.shift(tuple(start for start, _ in chunk.spans))
    common = there.intersect(band)
    if common is None:
        return []
    lead = len(common.spans) - len(part.box.spans)
    to_logical = tuple(own - at for (own, _), (at, _) in zip(part.box.spans, there.spans[lead:], strict=True))
    into = block[(0,) * lead][inside(band, common).slices[lead:]]
    return [Wanted(part.tensor, Box(common.spans[lead:]).shift(to_logical), into)]


def _complete(
    weights: Weights,
    folder: Path,
    written: Sequence[WrittenFile],
    *,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    num_ranks: int,
) -> None:
    """All that is not a data file; the manifest last."""
    args = megatron_args(weights.spec, parallel, dtype=dtype, ckpt_format="torch_dist")
    inside_it, empty = folder / RELEASE, extra_state_keys(weights.spec)
    inner = [*written, *write_metadata(inside_it, written, common=common_state(args), empty_objects=empty)]
    sums = Counter[str]()
    for one in written:
        for key, number in one.sums.items():
            sums[key] += number
    num_bytes = sum(item.box.num_elements * item.dtype.itemsize for one in written for item in one.items)
    complete(
        weights,
        folder,
        [replace(one, name=f"{RELEASE}/{one.name}") for one in inner],
        parallel=parallel,
        dtype=dtype,
        num_ranks=num_ranks,
        state=StateChecksum({key: wrapped(number) for key, number in sums.items()}, num_bytes),
        remarks=(*weights.remarks, *replicated(weights.spec, parallel, head=weights.head)),
    )
