"""A conversion through real files of weights that are made up: its speed beside a plain copy's, its memory, its proof.

Nothing is left of it. It needs room for the weights twice.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoint.convert.made import MadeWeights
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.outcome import Outcome, forget_peak
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Weights
from rlhf.checkpoint.verify.tensors import Compared, compare_tensors
from rlhf.errors import CheckpointError

Convert = Callable[[Weights, Path, Crew], Outcome]

_SPARE_BYTES = 2**30
"""Free space beyond twice the weights."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was measured, on the leading process."""

    made: Outcome
    """Writing the source: no file is read."""
    copied_bytes: int
    copy_seconds: float
    """Reading the source's files and writing them elsewhere, flushed, by one process."""
    converted: Outcome
    """Reading the source and writing the target; its memory is that of this part alone."""
    compared: Compared
    """Target against source."""

    @property
    def is_same(self) -> bool:
        """Whether every tensor is bit-equal in source and target."""
        return not self.compared.differences

    @property
    def against_copy(self) -> float:
        """How many times as fast as the copy of the same bytes the conversion was."""
        rate = self.converted.num_bytes / max(self.converted.seconds, 1e-9)
        return rate * self.copy_seconds / self.copied_bytes

    def text(self) -> str:
        """For the console."""
        rate = self.copied_bytes / max(self.copy_seconds, 1e-9) / 1e9
        proof = "each bit-equal to the source's" if self.is_same else "NOT THE SAME as the source's"
        return "\n".join(
            [
                self.made.text(),
                f"plain copy of these files: {self.copied_bytes:,} bytes, {self.copy_seconds:.1f} s, {rate:.2f} GB/s",
                self.converted.text(),
                f"  {self.against_copy:.2f} of the copy's speed; {self.compared.num_tensors} tensors, {proof}",
                *(f"  {one.tensor}: {one.what}" for one in self.compared.differences[:8]),
                "weights were made up; all of it was removed",
            ]
        )

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "made": self.made.as_json(),
            "copied_bytes": self.copied_bytes,
            "copy_seconds": self.copy_seconds,
            "converted": self.converted.as_json(),
            "against_copy": self.against_copy,
            "same": self.is_same,
        }


def rehearse(weights: MadeWeights, beside: Path, crew: Crew, *, make: Convert, convert: Convert) -> Rehearsal:
    """Write the made-up weights, copy them, convert them, compare, and remove all. Collective over the crew.

    Args:
        weights: The model.
        beside: A path on the disk to use; a hidden folder of a like name is made there and removed.
        crew: The processes.
        make: Writes the source.
        convert: The conversion that is measured.

    Raises:
        CheckpointError: The disk has no room for it; nothing was written then.
    """
    room = beside.with_name(f".{beside.name}.dummy")
    crew.together(lambda: _check_room(weights, room))
    try:
        made = make(weights, room / "source", crew)
        times: list[tuple[int, float]] = []
        crew.lead(lambda: times.append(_copy(room / "source", room / "copy")))
        crew.together(lambda: _forget_pages(room / "source"))
        crew.together(forget_peak)
        source = crew.together(lambda: open_weights(Given(room / "source")))
        converted = convert(source, room / "there", crew)
        there = crew.together(lambda: open_weights(Given(room / "there")))
        compared = compare_tensors(source, there, crew)
        crew.lead(lambda: shutil.rmtree(room))
    finally:
        if crew.leads:
            shutil.rmtree(room, ignore_errors=True)
    (num_bytes, seconds), *_ = times or [(1, 0.0)]
    return Rehearsal(made, num_bytes, seconds, converted, compared)


def _check_room(weights: MadeWeights, room: Path) -> None:
    there = next(parent for parent in room.absolute().parents if parent.exists())
    free, needed = shutil.disk_usage(there).free, 2 * weights.num_bytes + _SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"{there}: {free:,} bytes free; needs {needed:,} for these weights twice; choose a smaller model, or "
            "another disk"
        )


def _copy(source: Path, to: Path) -> tuple[int, float]:
    """(bytes, seconds) of copying the files of a folder, flushed to the disk; the copy is removed."""
    _forget_pages(source)
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    start, num_bytes = time.monotonic(), 0
    for path in files:
        target = to / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
        num_bytes += path.stat().st_size
    seconds = time.monotonic() - start
    shutil.rmtree(to)
    return num_bytes, seconds


def _forget_pages(folder: Path) -> None:
    """Ask the system to keep none of the folder's files in memory, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
