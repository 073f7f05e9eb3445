"""Any checkpoint -> the folder of mp_rank files that older Megatron-LM and `--ckpt-format torch` load.

OUT/latest_checkpointed_iteration.txt                "release": weights that no training has touched
OUT/release/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt    a file for each rank of the layout, which loads in no other
OUT/config.json, tokenizer.json, ...                 of the Hugging Face folder, so that the way back needs no original
OUT/conversion.json, manifest.json                   what was converted; every file's size and checksum
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.convert.files import complete
from rlhf.checkpoint.convert.megatron_args import common_state, megatron_args
from rlhf.checkpoint.convert.outcome import Outcome, concluded
from rlhf.checkpoint.convert.places import RELEASE
from rlhf.checkpoint.convert.ranks import Crew, appearing
from rlhf.checkpoint.convert.sources import Wanted, Weights, common_dtype
from rlhf.checkpoint.convert.to_megatron import replicated, said
from rlhf.checkpoint.legacy.file import FILE_NAME
from rlhf.checkpoint.legacy.frame import frame_of
from rlhf.checkpoint.legacy.layout import ranks_of_folders
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.checkpoint.store.data_file import WrittenFile
from rlhf.checkpoint.store.disk_stream import DiskStream
from rlhf.config.parallel import ParallelConfig
from rlhf.families.raw_tensor import READ_BYTES, RawTensor
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import EMBEDDING, OUTPUT, layers_before, megatron_layout, param_shapes
from rlhf.mcore.param_names import local_name, module_name
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout


@dataclass(frozen=True, slots=True)
class LegacyTarget:
    """What the files are for."""

    spec: ModelSpec
    head: Head
    parallel: ParallelConfig
    dtype: torch.dtype
    use_te: bool
    """Names of Transformer Engine's layers, Megatron-LM's default; else of its local ones."""

    @property
    def layout(self) -> ModelLayout:
        """Who holds what."""
        return megatron_layout(self.spec, self.parallel, head=self.head, dtype=str(self.dtype).removeprefix("torch."))

    def args(self) -> dict[str, object]:
        """Megatron-LM's arguments for it."""
        args = megatron_args(self.spec, self.parallel, dtype=self.dtype, ckpt_format="torch")
        args["transformer_impl"] = "transformer_engine" if self.use_te else "local"
        args["moe_grouped_gemm"] = self.use_te and self.spec.num_experts > 0
        return args


def to_legacy(
    weights: Weights,
    folder: Path,
    crew: Crew,
    *,
    parallel: ParallelConfig,
    dtype: str,
    overwrite: bool,
    use_te: bool = True,
) -> Outcome:
    """Write the weights to `folder`, which then exists whole or not at all. Collective over the crew.

    Args:
        weights: What is converted.
        folder: What is made.
        crew: The processes; all see one file system.
        parallel: The layout, with no more replicas than its experts need.
        dtype: Name of a dtype to cast to; empty keeps the bits.
        overwrite: Replace a folder that exists.
        use_te: See `LegacyTarget`.

    Raises:
        CheckpointError: The folder exists, a file of the source is damaged, or the format has no room for the layout.
        LayoutError: The layout cannot hold the model.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    start = time.monotonic()
    kept = crew.together(lambda: common_dtype(weights, dtype))
    target = LegacyTarget(weights.spec, weights.head, parallel, kept, use_te)
    ranks = crew.together(lambda: ranks_of_folders(parallel, target.layout, where=str(folder)))
    names, sizes = list(ranks), [rank_bytes(target, rank) for rank in ranks.values()]
    remarks = (*weights.remarks, *replicated(weights.spec, parallel, head=weights.head))
    with appearing(folder, weights.path, crew, overwrite=overwrite) as partial:
        places = crew.share(sizes)
        mine = crew.together(
            lambda: [_write(weights, partial, names[place], ranks[names[place]], target) for place in places]
        )
        written = [one for part in crew.all(mine) for one in part]
        crew.lead(
            lambda: complete(
                weights,
                partial,
                written,
                parallel=parallel,
                dtype=kept,
                num_ranks=crew.size,
                state=StateChecksum({}, sum(sizes)),
                remarks=remarks,
            )
        )
    return concluded(
        weights,
        folder,
        crew,
        folder_kind=f"Megatron-LM legacy, {said(parallel)}",
        dtype=kept,
        num_bytes=sum(sizes),
        num_files=len(names),
        start=start,
        remarks=remarks,
    )


def chunks_of_rank(target: LegacyTarget, rank: int) -> list[dict[str, tuple[int, ...]]]:
    """Shape of each parameter of a rank by the name in its module, for each model chunk."""
    spec, parallel = target.spec, target.parallel
    stage, chunks = rank // parallel.tp % parallel.pp, []
    for chunk, before in enumerate(layers_before(spec, parallel, stage)):
        shapes = param_shapes(spec, parallel, head=target.head, stage=stage, chunk=chunk)
        chunks.append(
            {
                module_name(name, before, use_te=target.use_te, has_experts=spec.num_experts > 0): shape
                for name, shape in shapes.items()
            }
        )
    return chunks


def rank_bytes(target: LegacyTarget, rank: int) -> int:
    """Of all elements in a rank's file."""
    shapes = [shape for chunk in chunks_of_rank(target, rank) for shape in chunk.values()]
    return sum(torch.Size(shape).numel() for shape in shapes) * target.dtype.itemsize


def _write(weights: Weights, folder: Path, name: str, rank: int, target: LegacyTarget) -> WrittenFile:
    """One rank's file, in order, a window of a few MiB after the other."""
    path = folder / RELEASE / name / FILE_NAME
    path.parent.mkdir(parents=True)
    chunks = chunks_of_rank(target, rank)
    entries = common_state(target.args())
    for number, shapes in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        entries[key] = {one: torch.empty(shape, dtype=target.dtype) for one, shape in shapes.items()}
    before = layers_before(target.spec, target.parallel, rank // target.parallel.tp % target.parallel.pp)
    params = [RawTensor(shape, target.dtype, 0) for shapes in chunks for shape in shapes.values()]
    names = [local_name(one, start) for start, shapes in zip(before, chunks, strict=True) for one in shapes]
    texts = frame_of(entries, [param.num_bytes for param in params])
    pieces: dict[str, list[ParamLayout]] = {}
    for piece in target.layout.holdings(rank):
        pieces.setdefault(piece.param, []).append(piece)
    with DiskStream(path) as disk:
        for text, param, of_param in zip(texts, params, names, strict=False):
            disk.append(text)
            is_padded = of_param in (EMBEDDING, OUTPUT)
            for part in _windows(weights, param, pieces.get(of_param, []), is_padded=is_padded):
                disk.append(part)
        disk.append(texts[-1])
    return WrittenFile(str(path.relative_to(folder)), disk.size, disk.checksum, (), {})


def _windows(weights: Weights, param: RawTensor, pieces: list[ParamLayout], *, is_padded: bool) -> Iterator[Tensor]:
    """A parameter's bytes in order, each window in the same memory. Padding is zeros."""
    row_bytes = param.num_bytes // param.shape[0]
    step = max(1, READ_BYTES // row_bytes)
    room = torch.empty(min(step, param.shape[0]) * row_bytes, dtype=torch.uint8)
    for first in range(0, param.shape[0], step):
        stop = min(first + step, param.shape[0])
        part = room[: (stop - first) * row_bytes]
        if is_padded:
            part.zero_()
        block = part.view(param.dtype).view(stop - first, *param.shape[1:])
        window = Box(((first, stop), *((0, extent) for extent in param.shape[1:])))
        weights.read([one for piece in pieces if (one := _wanted(piece, window, block)) is not None])
        yield part


def _wanted(piece: ParamLayout, window: Box, block: Tensor) -> Wanted | None:
    """What a window of a parameter takes of a piece."""
    common = piece.param_box(piece.box).intersect(window)
    if common is None:
        return None
    back = tuple(start - at for at, (start, _) in zip(piece.param_start, piece.box.spans, strict=True))
    into = block[common.shift(tuple(-start for start, _ in window.spans)).slices]
    return Wanted(piece.tensor, common.shift(back), into)
