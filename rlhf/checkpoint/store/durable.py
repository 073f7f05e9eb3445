"""Small files and folders that are on the disk when a call returns."""

import os
from pathlib import Path

import torch

from rlhf.checkpoint.store.data_file import WrittenFile
from rlhf.checkpoint.store.file_sum import sum_at


def write_file_whole(folder: Path, name: str, content: bytes) -> WrittenFile:
    """Write and flush a file that must not exist yet; folders on the way to it are made.

    Raises:
        OSError: The file exists or cannot be written.
    """
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(content)
        while left:  # a full disk takes a part first
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    total = sum_at(0, torch.frombuffer(bytearray(content), dtype=torch.uint8)) if content else 0
    return WrittenFile(name, len(content), total, (), {})


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in another's place: readers see one or the other, whole, also after the machine lost its power.

    One process does it at a time. Cut in the middle, it leaves `.NAME.partial` behind.
    """
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)
    write_file_whole(beside.parent, beside.name, content)
    beside.replace(path)
    flush_entries(path.parent)


def flush_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, and those of the folders in it."""
    for inner in (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        flush_folder(inner)
    flush_entries(folder)


def flush_entries(folder: Path) -> None:
    """Put a folder's own entries on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
