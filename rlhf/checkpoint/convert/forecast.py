"""What a conversion will write and take, from a model's numbers alone: files, sizes, memory. Nothing is written."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf.checkpoint.convert.made import MadeWeights
from rlhf.checkpoint.convert.outcome import peak_bytes
from rlhf.checkpoint.convert.places import RELEASE
from rlhf.checkpoint.convert.plan import plan_files
from rlhf.checkpoint.convert.sources import common_dtype
from rlhf.checkpoint.convert.to_legacy import LegacyTarget, rank_bytes
from rlhf.checkpoint.convert.to_megatron import planned_items, said
from rlhf.checkpoint.legacy.file import FILE_NAME
from rlhf.checkpoint.legacy.layout import ranks_of_folders
from rlhf.checkpoint.store.file_plan import WINDOW_BYTES
from rlhf.checkpoint.store.torch_dist import data_file_name
from rlhf.config.parallel import ParallelConfig
from rlhf.families.raw_tensor import READ_BYTES
from rlhf.families.registry import logical_tensors
from rlhf.families.writer import HfWriter
from rlhf.mcore.memory import model_bytes

_LISTED = 6
"""Files that a text names one by one."""

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """One conversion before it is run."""

    source: str
    family: str
    num_parameters: int
    num_tensors: int
    dtype: str
    num_bytes: int
    """Of all tensors."""
    target: str
    files: tuple[tuple[str, int], ...]
    """With weights: name and bytes, but for a few KiB around elements in the legacy format."""
    rank_bytes: int
    """Weights of the rank that holds most, in the layout that the files are cut for; 0 where they are cut for none."""
    processes: int
    share_bytes: int
    """What the busiest of the processes writes."""
    peak_bytes: int
    """Memory of a process: what it has now, with the plan made, and its buffers."""
    free_bytes: int
    """On the disk of the folder."""

    @property
    def fits(self) -> bool:
        """Whether the disk has room."""
        return sum(size for _, size in self.files) <= self.free_bytes

    def text(self) -> str:
        """For the console."""
        sizes = [size for _, size in self.files]
        room = "" if self.fits else ": NOT ENOUGH"
        several = f"{self.processes} processes" if self.processes > 1 else "one process"
        lines = [
            f"{self.source}: {self.family}, {self.num_parameters:,} parameters in {self.num_tensors} tensors, "
            f"{self.dtype}, {self.num_bytes:,} bytes",
            f"-> {self.target}",
            f"  {len(sizes)} files, {sum(sizes):,} bytes; largest {max(sizes):,}, smallest {min(sizes):,}; "
            f"free on the disk {self.free_bytes:,}{room}",
            *(f"  {name}  {size:,}" for name, size in self.files[:_LISTED]),
        ]
        if len(sizes) > _LISTED:
            lines.append(f"  and {len(sizes) - _LISTED} more")
        if self.rank_bytes:
            lines.append(f"  a rank of this layout holds at most {self.rank_bytes:,} bytes of weights")
        lines.append(
            f"  {several}: at most {self.share_bytes:,} bytes to write and about {self.peak_bytes / _GIB:.2f} GiB of "
            "memory each"
        )
        return "\n".join([*lines, "nothing was written"])

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "files"},
            "files": dict(self.files),
            "fits": self.fits,
        }


ShareOf = Callable[[Sequence[int]], int]
"""Largest part of some sizes that one of the processes gets, as `Crew.share` deals them out."""


def forecast_megatron(
    weights: MadeWeights, folder: Path, *, parallel: ParallelConfig, dtype: str, processes: int
) -> Forecast:
    """Of `to_megatron`.

    Raises:
        LayoutError: The layout cannot hold the model.
        ConfigError: The pipeline stages cannot hold the layers.
    """
    kept = common_dtype(weights, dtype)
    planned = plan_files(weights.spec, parallel, head=weights.head, item_bytes=kept.itemsize)
    files = [(f"{RELEASE}/{data_file_name(one.rank)}", planned_items(one, kept).size) for one in planned]
    return _forecast(
        weights,
        folder,
        f"Megatron torch_dist, {said(parallel)}",
        files,
        dtype=kept,
        processes=processes,
        buffers=2 * WINDOW_BYTES,
        rank_bytes=_most(weights, parallel, kept),
    )


def forecast_legacy(
    weights: MadeWeights, folder: Path, *, parallel: ParallelConfig, dtype: str, processes: int, use_te: bool
) -> Forecast:
    """Of `to_legacy`.

    Raises:
        CheckpointError: The format has no room for the layout.
        LayoutError, ConfigError: As `forecast_megatron`.
    """
    kept = common_dtype(weights, dtype)
    target = LegacyTarget(weights.spec, weights.head, parallel, kept, use_te)
    ranks = ranks_of_folders(parallel, target.layout, where=str(folder))
    files = [(f"{RELEASE}/{name}/{FILE_NAME}", rank_bytes(target, rank)) for name, rank in ranks.items()]
    return _forecast(
        weights,
        folder,
        f"Megatron-LM legacy, {said(parallel)}",
        files,
        dtype=kept,
        processes=processes,
        buffers=2 * READ_BYTES,
        rank_bytes=_most(weights, parallel, kept),
    )


def forecast_hf(weights: MadeWeights, folder: Path, *, dtype: str, shard_bytes: int, processes: int) -> Forecast:
    """Of `to_hf`: pages of the file that is being written count as memory of the process."""
    kept = common_dtype(weights, dtype)
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(weights.spec, head=weights.head)}
    shards = HfWriter(folder, shapes, dtype=kept, shard_bytes=shard_bytes, overwrite=True).shards
    files = [(shard.file, shard.num_bytes) for shard in shards]
    largest = max(shard.num_bytes for shard in shards)
    return _forecast(
        weights,
        folder,
        "Hugging Face folder",
        files,
        dtype=kept,
        processes=processes,
        buffers=largest + READ_BYTES,
        rank_bytes=0,
    )


def _forecast(
    weights: MadeWeights,
    folder: Path,
    target: str,
    files: Sequence[tuple[str, int]],
    *,
    dtype: torch.dtype,
    processes: int,
    buffers: int,
    rank_bytes: int,
) -> Forecast:
    parameters = weights.num_bytes // next(iter(weights.dtypes.values())).itemsize
    load = [0] * processes
    for size in sorted((size for _, size in files), reverse=True):
        load[load.index(min(load))] += size
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return Forecast(
        source=f"{weights.path} ({weights.kind})",
        family=weights.spec.family,
        num_parameters=parameters,
        num_tensors=len(weights.dtypes),
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=parameters * dtype.itemsize,
        target=f"{folder} ({target})",
        files=tuple(files),
        rank_bytes=rank_bytes,
        processes=processes,
        share_bytes=max(load),
        peak_bytes=peak_bytes() + buffers,
        free_bytes=shutil.disk_usage(there).free,
    )


def _most(weights: MadeWeights, parallel: ParallelConfig, dtype: torch.dtype) -> int:
    name = str(dtype).removeprefix("torch.")
    return max(
        model_bytes(weights.spec, parallel, head=weights.head, dtype=name, trainable=False, stage=stage).weights
        for stage in range(parallel.pp)
    )
