"""Shared memory and disk: size, free space, what dead processes left, and whether a folder can be written."""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf.doctor.finding import Finding, error, ok, warning

GIB = 2**30
SHM_GIB = 1.0
"""Docker gives 64 MiB, in which NCCL and torch's shared tensors do not fit."""
DISK_GIB, DISK_TIGHT_GIB = 5.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """A folder's file system."""

    path: str
    total_bytes: int
    free_bytes: int
    fault: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """What one host can put where."""

    shm: Space
    leftovers: tuple[str, ...]
    """Segments in shared memory whose process is gone."""
    leftover_bytes: int
    disks: tuple[Space, ...]

    @property
    def comparable(self) -> dict[str, str]:
        """What should be the same on all hosts."""
        return {"shared memory": f"{self.shm.total_bytes / GIB:.0f} GiB"}


def space_of(folder: Path) -> Space:
    """The file system of a folder, or of the nearest one above it that is there; writes a file and takes it away."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    usage, fault = shutil.disk_usage(there), ""
    probe = there / f".doctor_{os.uname().nodename}_{os.getpid()}"
    try:
        probe.write_text("x")
        probe.unlink()
    except OSError as refused:
        fault = str(refused)
    return Space(path=str(folder), total_bytes=usage.total, free_bytes=usage.free, fault=fault)


def dead_segments(shm: Path) -> list[Path]:
    """Segments of torch whose process is gone; others cannot be told from those in use."""
    pids = {path: re.match(r"torch_(\d+)_", path.name) for path in shm.glob("torch_*")}
    return sorted(path for path, match in pids.items() if match and not psutil.pid_exists(int(match[1])))


def probe_storage(folders: Iterable[Path], *, shm: Path = Path("/dev/shm")) -> Storage:
    """This host's, for the folders that a run writes to."""
    dead = dead_segments(shm)
    return Storage(
        shm=space_of(shm),
        leftovers=tuple(str(path) for path in dead),
        leftover_bytes=sum(path.stat().st_size for path in dead if path.exists()),
        disks=tuple(space_of(folder) for folder in folders),
    )


def judge_storage(storage: Storage) -> list[Finding]:
    """Findings, the good ones too."""
    shm = storage.shm
    text = f"{shm.path}: {shm.free_bytes / GIB:.1f} of {shm.total_bytes / GIB:.1f} GiB free"
    found = [ok("memory", text)]
    if shm.fault:
        found.append(error("memory", f"{shm.path} cannot be written: {shm.fault}", "mount a tmpfs there"))
    if shm.free_bytes < SHM_GIB * GIB:
        cure = "give the container more (docker --shm-size=8g or --ipc=host), or free what is left over there"
        found.append(warning("memory", f"{text}; needs {SHM_GIB:.0f}", cure))
    if storage.leftovers:
        many = f"{len(storage.leftovers)} segments of dead processes, {storage.leftover_bytes / GIB:.2f} GiB"
        first = f"rm {storage.leftovers[0]}" + (" and the others like it" if len(storage.leftovers) > 1 else "")
        found.append(warning("memory", f"{shm.path}: {many}", first))
    for disk in storage.disks:
        found.append(_judge_disk(disk))
    return found


def _judge_disk(disk: Space) -> Finding:
    free = disk.free_bytes / GIB
    text = f"{disk.path}: {free:.1f} of {disk.total_bytes / GIB:.0f} GiB free"
    if disk.fault:
        return error("disk", f"{disk.path} cannot be written: {disk.fault}", "mend its rights, or name another folder")
    if free < DISK_TIGHT_GIB:
        return error("disk", text, "free some space; a run would end in the middle of a write")
    if free < DISK_GIB:
        return warning("disk", text, f"free some space: checkpoints and caches want more than {DISK_GIB:.0f} GiB")
    return ok("disk", text)
