"""Is a checkpoint whole? Every file against the size and checksum in the manifest, before anything is taken from it."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.checkpoint.manifest import FileRecord, Manifest, read_manifest
from rlhf.checkpoint.patience import GONE, patiently
from rlhf.checkpoint.store.file_sum import sum_of_file
from rlhf.checkpoint.together import from_first, gathered, place
from rlhf.errors import CheckpointError, UnreadableError


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a checkpoint."""

    what: str
    """In words, the file first."""
    is_damage: bool
    """False: a file could not be read, though it was tried several times. It may be whole."""


def find_fault(path: Path, *, group: ProcessGroup | None, tick: Callable[[], None] = lambda: None) -> Fault | None:
    """What is wrong with a checkpoint's folder; None when every byte is as it was written.

    Damage comes before what could not be read. Collective over `group` (None: this process alone), whose ranks read the
    files between them, each once. `tick` is called for each piece that this rank has read.
    """
    number, count = place(group)
    manifest, fault = from_first(_manifest_or_fault(path) if number == 0 else (None, None), group)
    if manifest is None:
        return fault
    own = shares(manifest.files, count)[number]
    faults = [found for name in own if (found := file_fault(path / name, manifest.files[name], tick=tick)) is not None]
    told = [one for those in gathered(_damage_first(faults)[:1], group) for one in those]
    return next(iter(_damage_first(told)), None)


def find_damage(path: Path, *, group: ProcessGroup | None, tick: Callable[[], None] = lambda: None) -> str | None:
    """What is damaged, the file first; None when every byte is as it was written. Collective like `find_fault`.

    Raises:
        UnreadableError: That cannot be told, for a file could not be read. On all ranks.
    """
    fault = find_fault(path, group=group, tick=tick)
    if fault is not None and not fault.is_damage:
        raise UnreadableError(
            f"checkpoint {path}: {fault.what}; needs to be read, for it may be whole; see to the disk and try again, "
            "or move this checkpoint away to go on without it"
        )
    return None if fault is None else fault.what


def require_whole(path: Path, *, group: ProcessGroup | None) -> None:
    """Nothing, when the checkpoint is whole. Collective like `find_damage`.

    Raises:
        CheckpointError: It is not, or cannot be read. On all ranks.
    """
    damage = find_damage(path, group=group)
    if damage is not None:
        raise CheckpointError(
            f"checkpoint {path}: {damage}; needs every file as it was written; use another checkpoint"
        )


def file_fault(path: Path, record: FileRecord, *, tick: Callable[[], None] = lambda: None) -> Fault | None:
    """What is wrong with one file; None when it is as it was written."""
    try:
        size = patiently(path.stat).st_size
        if size != record.size:
            return Fault(f"{path.name} has {size} bytes, not {record.size}", is_damage=True)
        _, checksum = patiently(lambda: sum_of_file(path, tick=tick))
    except GONE as error:
        return Fault(f"{path.name}: {error.strerror}", is_damage=True)
    except OSError as error:
        return Fault(f"{path.name} could not be read ({error.strerror})", is_damage=False)
    if checksum != record.checksum:
        return Fault(f"{path.name} has not the bytes that were written (checksum)", is_damage=True)
    return None


def shares(files: Mapping[str, FileRecord], count: int) -> list[list[str]]:
    """The files dealt out so that all have about as much to read; the same on every rank."""
    loads = [(0, number) for number in range(count)]
    dealt: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(files, key=lambda one: (-files[one].size, one)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + files[name].size, number))
        dealt[number].append(name)
    return dealt


def _manifest_or_fault(path: Path) -> tuple[Manifest | None, Fault | None]:
    try:
        return read_manifest(path), None
    except CheckpointError as error:
        return None, Fault(str(error), is_damage=not isinstance(error, UnreadableError))


def _damage_first(faults: Sequence[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda one: not one.is_damage)
