"""Reading a Hugging Face checkpoint folder slice by slice. Knows no layout, no rank and no dtype but the file's own."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf.errors import CheckpointError
from rlhf.families.folder import SINGLE_FILE, check_shape, damaged, lacking, weight_files
from rlhf.families.raw_tensor import RawTensor
from rlhf.families.spec import LogicalTensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating dtypes by the names that safetensors headers use."""


class HfFolder:
    """The safetensors of a checkpoint folder, one file or sharded. Only the slices asked for are read.

    Raises:
        CheckpointError: No safetensors, an index that names a missing file, or (when first touched) a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, safe_open] = {}
        self._starts: dict[str, Mapping[str, int]] = {}
        self._file_of = weight_files(folder) or dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)

    def names(self) -> set[str]:
        """Names of all tensors in the folder."""
        return set(self._file_of)

    def unlisted(self) -> Mapping[str, str]:
        """Tensors that lie in a file though the index names another for them, or none: the file of each.

        Raises:
            CheckpointError: A file is damaged.
        """
        files = sorted(set(self._file_of.values()))
        return {name: file for file in files for name in self._handle(file).keys() if self._file_of.get(name) != file}  # noqa: SIM118 # not a dict

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: No file does.
        """
        if name not in self._file_of:
            raise lacking(self.folder, name)
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
        raw, spans = self._raw(name), self._spans(name, box)
        found = torch.empty([span.stop - span.start for span in spans], dtype=raw.dtype)
        self.read_into(name, box, found)
        return found

    def read_into(self, name: str, box: tuple[slice, ...], into: Tensor) -> None:
        """One block of a tensor into CPU memory of its shape, any strides, casting where the dtypes differ.

        Takes a few MiB beside it, and leaves no pages of the file behind.

        Raises:
            CheckpointError: As `read`.
        """
        raw, spans, path = self._raw(name), self._spans(name, box), self.file_of(name)
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise damaged(path, error) from error
        try:
            raw.read(handle, spans, into, path=path)
        finally:
            os.close(handle)

    def check(self, tensors: Iterable[LogicalTensor]) -> None:
        """Raise CheckpointError unless each tensor is there, of its shape and of a floating dtype (headers only)."""
        for tensor in tensors:
            self.dtype(tensor.name)
            check_shape(self.file_of(tensor.name), tensor, self.shape(tensor.name))

    def _spans(self, name: str, box: tuple[slice, ...]) -> tuple[slice, ...]:
        shape = self._raw(name).shape
        if len(box) != len(shape) or any((s.stop or 0) > extent for s, extent in zip(box, shape, strict=True)):
            raise CheckpointError(
                f"{self.file_of(name)}: {name} has shape {shape}; needs one that holds {box}; "
                "check that config.json belongs to these weights"
            )
        return tuple(slice(*one.indices(extent)[:2]) for one, extent in zip(box, shape, strict=True))

    def _raw(self, name: str) -> RawTensor:
        """Where a tensor's elements lie. The file's header is checked by `safe_open` before it is read here."""
        dtype, path = self.dtype(name), self.file_of(name)
        if path.name not in self._starts:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(length))
            self._starts[path.name] = {
                key: 8 + length + entry["data_offsets"][0] for key, entry in entries.items() if key != "__metadata__"
            }
        return RawTensor(self.shape(name), dtype, self._starts[path.name][name])

    def _handle(self, file: str) -> safe_open:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise damaged(self.folder / file, error) from error
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
