"""What a converted folder holds beside weights: tracker, the model's files, a record of the conversion, manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlhf.checkpoint.convert.options import LAYOUT
from rlhf.checkpoint.convert.outcome import remarks_json
from rlhf.checkpoint.convert.places import RECORD_FILE, RELEASE, TRACKER_FILE
from rlhf.checkpoint.convert.sources import Remark, Weights
from rlhf.checkpoint.convert.to_hf import model_config
from rlhf.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.checkpoint.store.data_file import WrittenFile
from rlhf.checkpoint.store.durable import flush_folder, write_file_whole
from rlhf.config.parallel import ParallelConfig
from rlhf.families.writer import carried_files


def complete(
    weights: Weights,
    folder: Path,
    written: Sequence[WrittenFile],
    *,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    num_ranks: int,
    state: StateChecksum,
    remarks: Sequence[Remark],
) -> None:
    """Write all that is not a file of weights, the manifest last. Local: one process calls it.

    Args:
        weights: What was converted.
        folder: The folder in the making.
        written: The files of weights, named relative to it.
        parallel: The layout that they are cut for.
        dtype: Of the weights.
        num_ranks: Processes that wrote.
        state: Sums of stored tensors.
        remarks: What is not one stored tensor for each logical one.

    Raises:
        OSError: A file cannot be written.
    """
    record = {
        "source": str(weights.path),
        "source_kind": weights.kind,
        "family": weights.spec.family,
        "dtype": str(dtype).removeprefix("torch."),
        "layout": {name: getattr(parallel, name) for name in (*LAYOUT, "layers_per_stage")},
        **remarks_json(remarks),
    }
    texts = {TRACKER_FILE: RELEASE, RECORD_FILE: _json(record), "config.json": _json(model_config(weights, dtype))}
    files = [*written, *(write_file_whole(folder, name, text.encode()) for name, text in texts.items())]
    if weights.hf_files is not None:
        for path in carried_files(weights.hf_files):
            name = str(path.relative_to(weights.hf_files))
            files.append(write_file_whole(folder, name, path.read_bytes()))
    manifest = Manifest(
        step=0,
        num_ranks=num_ranks,
        files={one.name: FileRecord(one.size, one.checksum) for one in files},
        state=state,
    )
    write_file_whole(folder, MANIFEST_FILE, manifest.render())
    flush_folder(folder)


def _json(record: Mapping[str, object]) -> str:
    return json.dumps(record, indent=1) + "\n"
