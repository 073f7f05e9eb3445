"""One file of Megatron-LM's legacy format, `model_optim_rng.pt`: what it says and where its tensors lie in it.

The file is a pickle, and nothing of it is run: torch's weights_only reader builds plain values, tensors without
elements, and the few classes of `admitted.py`; a file that asks for another is refused. Elements are read from their
place, a window at a time, so memory does not grow with the file.
"""

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from rlhf.checkpoint.legacy.admitted import only_admitted
from rlhf.errors import CheckpointError, DamagedError
from rlhf.families.raw_tensor import RawTensor

FILE_NAME = "model_optim_rng.pt"
VERSION = 3.0
"""Of the format; before it q, k and v lay in another order."""

_LOCAL_HEADER = Struct("<26xHH")
"""Of an entry of a zip file: lengths of the name and of what stands between it and the content."""

_CHUNK = re.compile(r"model\d*")


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """One rank's file, its tensors left where they are."""

    path: Path
    args: Mapping[str, object]
    """Megatron-LM's arguments."""
    iteration: int | None
    """Steps of training that it says."""
    chunks: tuple[Mapping[str, RawTensor], ...]
    """Tensors of each model chunk by Megatron's names."""
    dropped: tuple[str, ...]
    """What else is in it: extra states of modules (by name), entries that are no model."""


def read_legacy_file(path: Path) -> LegacyFile:
    """All of a file but the elements of its tensors.

    Raises:
        CheckpointError: It is missing, damaged, of another format or version, or would have to run code.
    """
    content = _unpickled(path)
    version = content.get("checkpoint_version", 0)
    if version != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version {version}; needs {VERSION}, since older files order q, k and v otherwise; "
            "load and save it with a newer Megatron-LM first"
        )
    args = content.get("args")
    if not isinstance(args, argparse.Namespace):
        raise CheckpointError(f"{path}: no args; needs Megatron-LM's arguments, which say how the model is cut")
    chunks, dropped = _chunks(content, path)
    iteration = content.get("iteration")
    return LegacyFile(path, dict(vars(args)), iteration if isinstance(iteration, int) else None, chunks, dropped)


def _unpickled(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise DamagedError(f"{path}: no such file; needs one for each rank that Megatron-LM's args name")
    if not zipfile.is_zipfile(path):
        raise DamagedError(
            f"{path}: no zip archive, as torch.save writes since 1.6, or cut short; needs a whole one; fetch it again, "
            "or load and save an older one with a newer torch"
        )
    try:
        with only_admitted():
            unknown = sorted(get_unsafe_globals_in_checkpoint(path))
            if unknown:
                raise CheckpointError(
                    f"{path}: asks for {', '.join(unknown)}; needs plain values, tensors and Megatron-LM's args alone, "
                    "since anything else could run code; save it again without them, if you trust it"
                )
            found = torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError, TypeError) as error:
        raise DamagedError(f"{path}: cannot be read ({_first_line(error)}); needs a whole file") from error
    except (AttributeError, IndexError, AssertionError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path}: cannot be read ({_first_line(error)}); needs a whole file") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}; needs Megatron-LM's dict of model and args")
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _chunks(content: Mapping[str, Any], path: Path) -> tuple[tuple[Mapping[str, RawTensor], ...], tuple[str, ...]]:
    """Tensors of each chunk, and what else is there."""
    found = {key for key in content if _CHUNK.fullmatch(key)}
    keys = ["model"] if found == {"model"} else [f"model{number}" for number in range(len(found))]
    if set(keys) != found or not found:
        named = ", ".join(sorted(found)) or "no model"
        raise CheckpointError(f"{path}: holds {named}; needs model, or model0, model1 and so on, none left out")
    places, chunks = _record_starts(path), []
    dropped = [
        key for key in ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine") if key in content
    ]
    for key in keys:
        chunk = {}
        for name, value in content[key].items():
            if name.endswith("_extra_state"):
                dropped.append(name)
            elif isinstance(value, Tensor):
                chunk[name] = _stored(name, value, places, path)
            else:
                raise CheckpointError(f"{path}: {name} is a {type(value).__name__}; needs a tensor")
        chunks.append(chunk)
    return tuple(chunks), tuple(dropped)


def _stored(name: str, tensor: Tensor, places: Mapping[int, int], path: Path) -> RawTensor:
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", -1)
    if places.get(start, -1) < storage.nbytes():
        raise DamagedError(f"{path}: no elements of {name} where they should be; needs a whole file; fetch it again")
    if not tensor.is_contiguous() or not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype} of strides {tensor.stride()}; needs floating point in row-major order; "
            "save it again that way"
        )
    at = start + int(tensor.storage_offset()) * tensor.dtype.itemsize
    return RawTensor(tuple(tensor.shape), tensor.dtype, at)


def _record_starts(path: Path) -> Mapping[int, int]:
    """First byte of each uncompressed entry of the archive, and how many bytes it has."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            if entry.compress_type == zipfile.ZIP_STORED:
                file.seek(entry.header_offset)
                name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                found[entry.header_offset + _LOCAL_HEADER.size + name + extra] = entry.file_size
    return found
