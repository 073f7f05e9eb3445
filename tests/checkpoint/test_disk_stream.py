"""Streams of bytes in any pieces, on disks that take direct writes and on others; sums of parts of a file."""

import errno
import os

import pytest
import torch

from rlhf.checkpoint.store import disk_stream
from rlhf.checkpoint.store.disk_stream import DiskStream
from rlhf.checkpoint.store.file_sum import READ_BYTES, sum_at, sum_of_file
from rlhf.reshard.checksum import wrapped


def refuse_to_open(monkeypatch):
    real = os.open

    def opened(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", opened)


def refuse_to_write(monkeypatch):
    """Opened for direct writes, and then none is taken: so do some stacked file systems."""
    real_open, real_write, direct = os.open, os.pwrite, set()

    def opened(path, flags, *args):
        handle = real_open(path, flags, *args)
        if flags & os.O_DIRECT:
            direct.add(handle)
        return handle

    def written(handle, *args):
        if handle in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(handle, *args)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)


def take_small_parts(monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, part, at: real(handle, part[: max(4096, len(part) // 2)], at))


@pytest.mark.parametrize("disk", [None, refuse_to_open, refuse_to_write, take_small_parts])
def test_what_is_appended_is_what_lies_there(tmp_path, monkeypatch, disk):
    monkeypatch.setattr(disk_stream, "BUFFER_BYTES", 16384)
    if disk is not None:
        disk(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    for sizes in ([], [1], [16384], [4096, 3], [100, 70_000, 16384, 5], [16383, 1, 16385]):
        parts = [torch.randint(0, 256, (size,), generator=generator).to(torch.uint8) for size in sizes]
        path = tmp_path / f"of {sizes}"
        with DiskStream(path) as disk_now:
            for part in parts:
                kept = part.clone()
                disk_now.append(kept)
                kept.zero_()
        expected = b"".join(bytes(part.numpy()) for part in parts)
        assert path.read_bytes() == expected
        assert sum_of_file(path) == (len(expected), disk_now.checksum)
        assert disk_now.size == len(expected)
        with pytest.raises(FileExistsError):
            DiskStream(path)


def test_sums_of_parts_add_up_and_tell_places_apart(tmp_path):
    generator = torch.Generator().manual_seed(2)
    content = torch.randint(0, 256, (READ_BYTES + 200_003,), generator=generator).to(torch.uint8)
    (tmp_path / "file").write_bytes(bytes(content.numpy()))
    whole = sum_of_file(tmp_path / "file")
    assert whole[0] == len(content)
    for cuts in ([0], [0, 1, 7, 65536, 131_071, 131_072], [0, 65_536, READ_BYTES + 3], [0, 99_999, 100_000]):
        ends = [*cuts[1:], len(content)]
        assert whole[1] == wrapped(
            sum(sum_at(start, content[start:end]) for start, end in zip(cuts, ends, strict=True))
        )
    for at in (0, 65_535, 65_536, READ_BYTES, len(content) - 1):
        for bit in (0, 7):
            content[at] ^= 1 << bit
            assert sum_at(0, content) != whole[1]
            content[at] ^= 1 << bit
    moved = torch.cat([content[8:16], content[:8], content[16:]])
    assert sum_at(0, moved) != whole[1]
