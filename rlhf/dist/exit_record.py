"""How a job ended: `exit.json` in the run folder, and the codes it may hold. Knows no torch: the launcher reads it too.

The first rank to fail writes the record (creating the file is the claim), so the record names the cause and not one
of its consequences. A rank that ends well writes code 0 or 75 at the very end, after all ranks came through.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """What `scripts/launch.sh` returns."""

    FINISHED = 0
    BAD_INPUT = 2
    RANK_FAILED = 3
    STOPPED = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRecord:
    """The end of a job, or of one rank."""

    code: int
    """An ExitCode."""
    reason: str
    """One sentence; for a failure the exception or what was seen."""
    rank: int | None = None
    """The rank that is to blame; None when the job ended well or nobody can know."""
    reporter: int | None = None
    """The rank that wrote the record: another than `rank` when that one can no longer speak."""
    phase: str = ""
    """What the blamed rank was doing."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self)) + "\n"


def exit_path(run_folder: Path) -> Path:
    """The job's record."""
    return run_folder / "exit.json"


def failure_path(run_folder: Path, rank: int) -> Path:
    """One failing rank's own record."""
    return run_folder / "logs" / f"failed_rank_{rank}.json"


def claim(run_folder: Path, record: ExitRecord) -> bool:
    """Write the job's record unless there is one already; True when it is this one."""
    try:
        handle = os.open(exit_path(run_folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(record.to_json())
    return True


def write_over(path: Path, record: ExitRecord) -> None:
    """Write a record in place of what is there; readers see the old one or the new one, never half."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(record.to_json())
    fresh.replace(path)


def read_record(path: Path) -> ExitRecord | None:
    """The record, or None when there is none or its writer died over it."""
    try:
        return ExitRecord(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def clear_marks(run_folder: Path) -> None:
    """Take away what an earlier job in this folder left about its end, its ranks and its stop request."""
    stale = [exit_path(run_folder), run_folder / "stop"]
    stale += (run_folder / "logs").glob("failed_rank_*.json")
    stale += (run_folder / "heartbeat").glob("rank_*.json")
    for path in stale:
        path.unlink(missing_ok=True)
