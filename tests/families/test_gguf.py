"""GGUF files: values against the block formats spelled out one value at a time; damaged files are refused by name."""

import struct
from pathlib import Path

import numpy as np
import pytest

from rlhf.errors import CheckpointError
from rlhf.families.gguf import GgufFile
from tests.harness.gguf import F16, Q4_1, Q8_0, f32, write_gguf

SHAPE = (3, 64)
BLOCKS = 3 * 64 // 32


def q4_1_block(random: np.random.Generator) -> tuple[bytes, list[float]]:
    """Twenty bytes, and the 32 values that they stand for."""
    scale, least = (struct.unpack("<e", struct.pack("<e", random.normal()))[0] for _ in range(2))
    steps = [int(step) for step in random.integers(0, 16, size=32)]
    packed = bytes(steps[i] | steps[i + 16] << 4 for i in range(16))
    return struct.pack("<ee", scale, least) + packed, [step * scale + least for step in steps]


def q8_0_block(random: np.random.Generator) -> tuple[bytes, list[float]]:
    """Thirty-four bytes, and the 32 values that they stand for."""
    (scale,) = struct.unpack("<e", struct.pack("<e", random.normal()))
    steps = [int(step) for step in random.integers(-128, 128, size=32)]
    return struct.pack("<e32b", scale, *steps), [step * scale for step in steps]


def test_values_are_those_of_the_block_formats(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    fours, eights = ([block(random) for _ in range(BLOCKS)] for block in (q4_1_block, q8_0_block))
    plain = random.normal(size=(2, 3, 5)).astype(np.float32)
    half = random.normal(size=(7,)).astype(np.float16)
    path = tmp_path / "all.gguf"
    write_gguf(
        path,
        {"general.name": "naïve", "a": 7, "b": 0.5, "c": True, "words": ["x", "yz"], "kinds": [1, -3]},
        {
            "four": (Q4_1, SHAPE, b"".join(raw for raw, _ in fours)),
            "plain": f32(plain),
            "half": (F16, (7,), half.astype("<f2").tobytes()),
            "eight": (Q8_0, SHAPE, b"".join(raw for raw, _ in eights)),
        },
    )
    file = GgufFile(path)
    assert file.metadata == {
        "general.name": "naïve",
        "a": 7,
        "b": 0.5,
        "c": True,
        "words": ["x", "yz"],
        "kinds": [1, -3],
    }
    assert np.array_equal(file.read("plain"), plain)
    assert np.array_equal(file.read("half"), half.astype(np.float32))
    for name, blocks in (("four", fours), ("eight", eights)):
        expected = np.array([value for _, values in blocks for value in values]).reshape(SHAPE)
        # one product and one sum in float32 against float64: half a unit in the last place each, of values below 70
        np.testing.assert_allclose(file.read(name), expected, rtol=2e-7, atol=2e-6)
        assert file.read(name).dtype == np.float32


def test_tensors_begin_at_multiples_of_the_stated_alignment(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    first, second = np.arange(3, dtype=np.float32), np.arange(5, dtype=np.float32) + 10
    write_gguf(path, {"general.alignment": 256}, {"first": f32(first), "second": f32(second)}, align=256)
    assert np.array_equal(GgufFile(path).read("second"), second)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(
        whole, {"a": 7}, {"odd": (Q8_0, (3, 31), bytes(102)), "new": (14, (32,), bytes(64)), "x": f32(np.ones(40))}
    )
    content = whole.read_bytes()
    aligned = tmp_path / "aligned.gguf"
    write_gguf(aligned, {"general.alignment": 0}, {"x": f32(np.ones(2))})
    cases = {
        "does not begin as GGUF": b"GGML" + content[4:],
        "does not begin as GGUF version": content[:4] + struct.pack("<I", 1) + content[8:],
        "ends early": content[:60],
        "GGUF version 2 or 3": b"",
        "not UTF-8": content.replace(b"odd", b"o\xffd"),
        "alignment is 0": aligned.read_bytes(),
    }
    for what, changed in cases.items():
        path = tmp_path / "damaged.gguf"
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=what if changed else "ends early|" + what):
            GgufFile(path)
    with pytest.raises(CheckpointError, match=r"gone\.gguf: no such file"):
        GgufFile(tmp_path / "gone.gguf")
    file = GgufFile(whole)
    for name, what in (("odd", "no multiple of 32"), ("new", "storage type 14"), ("lost", "no tensor lost")):
        with pytest.raises(CheckpointError, match=what):
            file.read(name)
    short = tmp_path / "short.gguf"
    short.write_bytes(content[:-64])
    with pytest.raises(CheckpointError, match="ends early"):
        GgufFile(short).read("x")
