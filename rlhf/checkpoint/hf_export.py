"""A live model, in whatever layout, written as a Hugging Face checkpoint folder: a reshard whose destination is files.

Knows no Megatron: the model is a `ModelLayout` and its local parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.dist.agree import gather
from rlhf.errors import CheckpointError, LayoutError, SaveError
from rlhf.families.registry import hf_config, logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.families.writer import DEFAULT_SHARD_BYTES, HfWriter, Shard
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import DEFAULT_BUCKET_BYTES, WeightSync


def export_hf(
    spec: ModelSpec,
    layout: ModelLayout,
    params: Mapping[str, Tensor],
    folder: Path,
    *,
    head: Head,
    source_folder: Path | None,
    group: ProcessGroup | None,
    topology: Topology,
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """Write the model to `folder`, which then exists whole or not at all. Returns when it does.

    Collective over `group`, a gloo group of exactly the layout's ranks (None on other ranks, which return at once); all
    must see one file system. Each file has one writing rank, and its mapped pages receive the blocks: beside the
    parameters a rank needs two buckets. Parameters may be on a GPU; they are read as they are.

    Args:
        spec: The model.
        layout: Who holds what of it.
        params: This rank's parameters by the layout's names.
        folder: Where the checkpoint will be; its parent must be writable.
        head: What the model's last tensor is.
        source_folder: Checkpoint whose tokenizer, chat template and generation files are copied; None copies none.
        group: See above.
        topology: Nodes of the job's ranks.
        overwrite: Replace a folder that exists.
        shard_bytes: Upper size of a file.
        bucket_bytes: Upper size of a staging buffer.

    Raises:
        LayoutError: The layout is not one of this model.
        CheckpointError: The folder exists and overwrite is off.
        SaveError: A file cannot be written (on all ranks); nothing is left of it then.
    """
    if group is None:
        return
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(spec, head=head)}
    for name in shapes.keys() | layout.tensors.keys():
        if shapes.get(name) != layout.tensors.get(name):
            raise LayoutError(
                f"export to {folder}: {name} is {layout.tensors.get(name)} in the layout and {shapes.get(name)} in the "
                f"model with head {head.value}; needs one shape; hand in the layout of this model"
            )
    dtype = getattr(torch, layout.dtype)
    writer = HfWriter(folder, shapes, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite)
    files = files_layout(writer.shards, layout)
    sync = WeightSync(layout, files, topology=topology, group=group, bucket_bytes=bucket_bytes)  # all saw no folder
    rank, leads = dist.get_rank(), dist.get_rank() == layout.ranks[0]
    mine = {one.param for one in files.holdings(rank)} if rank in files.ranks else set()
    pages: dict[str, Tensor] = {}
    open_files = ExitStack()

    def open_all() -> None:
        for shard in writer.shards:
            if shard.tensors[0] in mine:
                pages.update(open_files.enter_context(writer.fill(shard)))

    def finish() -> None:
        writer.finish(hf_config(spec, head=head, dtype=layout.dtype), source_folder=source_folder)

    try:
        _together(writer.begin if leads else _nothing, folder, group)
        with open_files:
            _together(open_all, folder, group)
            sync.update_weights(params, pages)
            _together(open_files.close, folder, group)
        _together(finish if leads else _nothing, folder, group)
    except SaveError:
        if leads:
            writer.abandon()
        raise


def _together(work: Callable[[], object], folder: Path, group: ProcessGroup) -> None:
    """Do something that may fail on any rank, where no rank may wait for one that has left. Collective.

    Raises:
        SaveError: On all ranks, if it failed on one.
    """
    fault = ""
    try:
        work()
    except OSError as error:
        fault = f"{error.filename or 'write'}: {error.strerror or error}"
    except CheckpointError as error:
        fault = str(error)
    faults = [one for one in gather(fault, group) if one]
    if faults:
        raise SaveError(f"export to {folder}: {faults[0]}; needs a place to write; make room, or name another")


def _nothing() -> None:
    """Of the ranks that wait for the first."""


def files_layout(shards: Sequence[Shard], layout: ModelLayout) -> ModelLayout:
    """Each tensor whole on the rank that writes its file; a file goes to the rank that has least to write so far."""
    load = dict.fromkeys(layout.ranks, 0)
    held: dict[int, list[ParamLayout]] = {}
    for shard in sorted(shards, key=lambda one: -one.num_bytes):
        writer = min(load, key=lambda rank: (load[rank], rank))
        load[writer] += shard.num_bytes
        for name in shard.tensors:
            shape = layout.tensors[name]
            whole = Box(tuple((0, extent) for extent in shape))
            held.setdefault(writer, []).append(ParamLayout(name, whole, name, (0,) * len(shape)))
    tuples = {rank: tuple(ones) for rank, ones in held.items()}
    return ModelLayout(layout.tensors, layout.dtype, tuple(sorted(tuples)), tuples.__getitem__)
