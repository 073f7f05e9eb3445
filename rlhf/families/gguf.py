"""Reading GGUF files, the single-file format of llama.cpp: metadata, and tensors dequantised to float32.

Knows the storage types F32, F16, Q4_1 and Q8_0. Knows no model: names and meaning of the entries are the caller's.
Source: github.com/ggml-org/ggml, docs/gguf.md (layout of the file) and src/ggml-common.h (blocks).
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from rlhf.errors import CheckpointError

BLOCK = 32
"""Values that share a scale in Q4_1 and Q8_0."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies; its shape is as torch has it (the file lists the dims from the innermost out)."""

    shape: tuple[int, ...]
    storage: int
    offset: int


class GgufFile:
    """One GGUF file of version 2 or 3, its tensors read on demand.

    Raises:
        CheckpointError: It is no such file, or it ends early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; needs a GGUF file; correct the path")
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        self._at = 0
        if self._take(4) != b"GGUF" or (version := self._unpack("I")) not in (2, 3):
            raise CheckpointError(
                f"{path}: does not begin as GGUF version 2 or 3 does; needs one; fetch the file again"
            )
        num_tensors, num_entries = self._unpack("Q"), self._unpack("Q")
        self.version = version
        self.metadata: Mapping[str, object] = dict(self._entry() for _ in range(num_entries))
        tensors = [self._tensor() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise CheckpointError(
                f"{path}: general.alignment is {align!r}; needs a positive whole number; fetch the file again"
            )
        start = -(-self._at // align) * align
        self.tensors: Mapping[str, GgufTensor] = {
            name: GgufTensor(shape, storage, start + offset) for name, shape, storage, offset in tensors
        }

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32 [its shape], dequantised.

        Raises:
            CheckpointError: No such tensor, a storage type that is not known here, or the file ends early.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name}; needs it; fetch the file again")
        tensor = self.tensors[name]
        if tensor.storage not in _STORAGES:
            raise CheckpointError(
                f"{self.path}: {name} has storage type {tensor.storage}; needs one of "
                f"{', '.join(f'{number} ({one.name})' for number, one in _STORAGES.items())}; take another file"
            )
        storage, count = _STORAGES[tensor.storage], prod(tensor.shape)
        if (tensor.shape or (1,))[-1] % storage.block:
            raise CheckpointError(
                f"{self.path}: {name} is {tensor.shape}, whose rows are no multiple of {storage.block}; "
                "needs whole blocks; fetch the file again"
            )
        size = count // storage.block * storage.block_bytes
        raw = self._bytes[tensor.offset : tensor.offset + size]
        if raw.size != size:
            raise self._short()
        return storage.dequantise(raw.reshape(-1, storage.block_bytes)).reshape(tensor.shape)

    def _take(self, size: int) -> bytes:
        taken = self._bytes[self._at : self._at + size].tobytes()
        if len(taken) != size:
            raise self._short()
        self._at += size
        return taken

    def _short(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: ends early; needs the whole file; fetch it again")

    def _unpack(self, code: str) -> int:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return value

    def _text(self) -> str:
        text = self._take(self._unpack("Q"))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: holds text that is not UTF-8 ({error}); fetch the file again"
            ) from error

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            item, count = self._unpack("I"), self._unpack("Q")
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata of type {kind}; needs 0..12; fetch the file again")
        return self._unpack(_SCALARS[kind])

    def _entry(self) -> tuple[str, object]:
        key = self._text()
        return key, self._value(self._unpack("I"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        dims = [self._unpack("Q") for _ in range(self._unpack("I"))]
        return name, tuple(reversed(dims)), self._unpack("I"), self._unpack("Q")


@dataclass(frozen=True, slots=True)
class _Storage:
    """How values lie in blocks; `dequantise` maps [blocks, block_bytes] of bytes to float32 [blocks, block]."""

    name: str
    block: int
    block_bytes: int
    dequantise: Callable[[np.ndarray], np.ndarray]


def _halves(raw: np.ndarray) -> np.ndarray:
    """fp16 scales [blocks, n] as float32, from [blocks, 2 n] bytes."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """Scale and least value (fp16 each), then 16 bytes: low nibbles are values 0-15, high nibbles values 16-31."""
    scale_and_least, packed = _halves(raw[:, :4]), raw[:, 4:]
    steps = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return steps * scale_and_least[:, :1] + scale_and_least[:, 1:]


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """A scale (fp16), then 32 signed bytes."""
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32) * _halves(raw[:, :2])


_STORAGES: Mapping[int, _Storage] = {
    0: _Storage("F32", 1, 4, lambda raw: np.ascontiguousarray(raw).view("<f4").astype(np.float32)),
    1: _Storage("F16", 1, 2, _halves),
    3: _Storage("Q4_1", BLOCK, 20, _q4_1),
    8: _Storage("Q8_0", BLOCK, 34, _q8_0),
}
