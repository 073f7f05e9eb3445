"""Reading a Hugging Face checkpoint folder slice by slice. Knows no layout, no rank and no dtype but the file's own."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf.errors import CheckpointError
from rlhf.families.registry import read_json
from rlhf.families.spec import LogicalTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating dtypes by the names that safetensors headers use."""


def resolve_folder(path_or_hub_id: str) -> Path:
    """The checkpoint folder that `model.path` means: a folder, or a hub id found in the local cache.

    Never uses the network.

    Raises:
        CheckpointError: There is neither such a folder nor such a cached model.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_hub_id):
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # half a second that folders do not need
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

        try:
            return Path(snapshot_download(path_or_hub_id, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    raise CheckpointError(
        f"model.path: {path_or_hub_id!r} is neither a folder nor a hub id in the local cache; "
        "needs a Hugging Face checkpoint folder; correct the path, or download it with `hf download` first"
    )


class HfFolder:
    """The safetensors of a checkpoint folder, one file or sharded. Only the slices asked for are read.

    Raises:
        CheckpointError: No safetensors, an index that names a missing file, or (when first touched) a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, safe_open] = {}
        if (folder / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        elif (folder / INDEX_FILE).is_file():
            self._file_of = self._read_index(folder / INDEX_FILE)
        else:
            raise CheckpointError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; needs one of them; "
                "save the model again with safe_serialization=True"
            )

    def names(self) -> set[str]:
        """Names of all tensors in the folder."""
        return set(self._file_of)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: No file does.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: no tensor {name}; needs it for this model; check that model.path is complete"
            )
        return self.folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the file's header.

        Raises:
            CheckpointError: It is not a floating dtype.
        """
        found = self._slice(name).get_dtype()
        if found not in DTYPES:
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has dtype {found}; needs one of {', '.join(DTYPES)}; "
                "use an unquantised checkpoint"
            )
        return DTYPES[found]

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """One block of a tensor in the file's dtype: a fresh tensor that the caller owns.

        Raises:
            CheckpointError: The tensor is missing, the block reaches beyond it, or the file is damaged.
        """
        view, shape = self._slice(name), self.shape(name)
        if len(box) != len(shape) or any((s.stop or 0) > extent for s, extent in zip(box, shape, strict=True)):
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has shape {shape}; needs one that holds {box}; "
                "check that config.json belongs to these weights"
            )
        try:
            return view[box]
        except SafetensorError as error:
            raise self._damaged(self._file_of[name], error) from error

    def check(self, tensors: Iterable[LogicalTensor]) -> None:
        """Raise CheckpointError unless the folder holds each tensor with exactly its shape (headers only)."""
        for tensor in tensors:
            if (found := self.shape(tensor.name)) != tensor.shape:
                raise CheckpointError(
                    f"{self.file_of(tensor.name)}: {tensor.name} has shape {found}; needs {tensor.shape}; "
                    "check that config.json belongs to these weights"
                )

    def _read_index(self, path: Path) -> dict[str, str]:
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: no weight_map; needs tensor -> file names; fetch the file again")
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).is_file():
                lost = next(name for name, of in weight_map.items() if of == file)
                raise CheckpointError(
                    f"{path}: names {file}, which is missing; needs it for {lost} and others; fetch the file again"
                )
        return dict(weight_map)

    def _handle(self, file: str) -> safe_open:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._handles[file]

    def _slice(self, name: str) -> Any:  # PySafeSlice is not a public type
        self.file_of(name)
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / file}: no tensor {name} although the index says so ({error}); fetch the file again"
            ) from error

    def _damaged(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file}: cannot be read ({error}); needs a whole safetensors file; fetch the file again"
        )
