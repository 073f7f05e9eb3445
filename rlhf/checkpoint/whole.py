"""Is a checkpoint whole? Every file against the size and checksum in the manifest, before anything is taken from it."""

import heapq
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.checkpoint.manifest import FileRecord, Manifest, read_manifest
from rlhf.checkpoint.store.file_sum import sum_of_file
from rlhf.checkpoint.together import from_first, gathered, place
from rlhf.errors import CheckpointError


def find_damage(path: Path, *, group: ProcessGroup | None, tick: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with a checkpoint's folder, the file first; None when every byte is as it was written.

    Collective over `group` (None: this process alone), whose ranks read the files between them, each once.
    `tick` is called for each piece that this rank has read.
    """
    number, count = place(group)
    manifest, fault = from_first(_manifest_or_fault(path) if number == 0 else (None, None), group)
    if manifest is None:
        return fault
    own = shares(manifest.files, count)[number]
    faults = [found for name in own if (found := file_fault(path / name, manifest.files[name], tick=tick)) is not None]
    return next((one for those in gathered(faults[:1], group) for one in those), None)


def require_whole(path: Path, *, group: ProcessGroup | None) -> None:
    """Nothing, when the checkpoint is whole. Collective like `find_damage`.

    Raises:
        CheckpointError: It is not, on all ranks.
    """
    damage = find_damage(path, group=group)
    if damage is not None:
        raise CheckpointError(
            f"checkpoint {path}: {damage}; needs every file as it was written; use another checkpoint"
        )


def file_fault(path: Path, record: FileRecord, *, tick: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with one file; None when it is as it was written."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path.name} has {size} bytes, not {record.size}"
        _, checksum = sum_of_file(path, tick=tick)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None if checksum == record.checksum else f"{path.name} has not the bytes that were written (checksum)"


def shares(files: Mapping[str, FileRecord], count: int) -> list[list[str]]:
    """The files dealt out so that all have about as much to read; the same on every rank."""
    loads = [(0, number) for number in range(count)]
    dealt: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(files, key=lambda one: (-files[one].size, one)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + files[name].size, number))
        dealt[number].append(name)
    return dealt


def _manifest_or_fault(path: Path) -> tuple[Manifest | None, str | None]:
    try:
        return read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)
