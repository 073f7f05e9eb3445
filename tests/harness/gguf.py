"""Writing GGUF files for tests, straight from the format's description: nothing here is shared with the reader."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]],
    *,
    align: int = 32,
) -> None:
    """One file of version 3; a tensor is its storage type, its shape as torch has it, and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    at = 0
    for name, (storage, shape, content) in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", storage, at)
        at += -(-len(content) // align) * align
    body = b"".join(content + bytes(-len(content) % align) for _, _, content in tensors.values())
    path.write_bytes(head + bytes(-len(head) % align) + body)


def f32(array: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    """A tensor stored as it is."""
    return F32, array.shape, array.astype("<f4").tobytes()


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    kind, item = (8, _text) if isinstance(value[0], str) else (5, lambda one: struct.pack("<i", one))
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(item(one) for one in value)
