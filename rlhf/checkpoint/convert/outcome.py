"""What a conversion came to: sizes, speed, memory, and the tensors that are not simply copied."""

import re
import resource
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Place, Remark, Weights

LISTED = 3
"""Kinds of tensors that a table names one by one."""

_GIB = 2**30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One conversion, on the leading process."""

    source: Path
    source_kind: str
    folder: Path
    folder_kind: str
    family: str
    num_tensors: int
    dtype: str
    num_bytes: int
    """Of the tensors written."""
    num_files: int
    seconds: float
    peak_bytes: int
    """Of memory, the most of any process: pages of mapped files included, which the system takes back at need."""
    num_ranks: int
    remarks: tuple[Remark, ...]
    note: str = ""
    """About the whole, where there is something to say."""

    def text(self) -> str:
        """For the console."""
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        lines = [
            f"{self.source} ({self.source_kind}) -> {self.folder} ({self.folder_kind})",
            f"  {self.family}, {self.num_tensors} tensors, {self.dtype}, {self.num_bytes:,} bytes in {self.num_files} "
            f"file{'s' * (self.num_files > 1)}",
            f"  {self.seconds:.1f} s, {rate:.2f} GB/s, peak memory {self.peak_bytes / _GIB:.2f} GiB"
            + (f" of {self.num_ranks} processes" if self.num_ranks > 1 else ""),
        ]
        if self.note:
            lines.append(f"  note: {self.note}")
        return "\n".join([*lines, *listed(self.remarks)])

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "source": str(self.source),
            "source_kind": self.source_kind,
            "folder": str(self.folder),
            "folder_kind": self.folder_kind,
            "family": self.family,
            "num_tensors": self.num_tensors,
            "dtype": self.dtype,
            "num_bytes": self.num_bytes,
            "num_files": self.num_files,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "num_ranks": self.num_ranks,
            "note": self.note,
            **remarks_json(self.remarks),
        }


def concluded(
    weights: Weights,
    folder: Path,
    crew: Crew,
    *,
    folder_kind: str,
    dtype: torch.dtype,
    num_bytes: int,
    num_files: int,
    start: float,
    remarks: tuple[Remark, ...],
    note: str = "",
) -> Outcome:
    """What a conversion came to that began at `start` (time.monotonic). Collective over the crew."""
    return Outcome(
        source=weights.path,
        source_kind=weights.kind,
        folder=folder,
        folder_kind=folder_kind,
        family=weights.spec.family,
        num_tensors=len(weights.dtypes),
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=num_bytes,
        num_files=num_files,
        seconds=time.monotonic() - start,
        peak_bytes=max(crew.all(peak_bytes())),
        num_ranks=crew.size,
        remarks=remarks,
        note=note,
    )


def listed(remarks: Iterable[Remark]) -> list[str]:
    """Lines for a console: of each kind the tensors and why; those that differ in numbers alone are one, counted."""
    lines, remarks = [], tuple(remarks)
    for place in Place:
        why: dict[str, Counter[str]] = {}
        for one in remarks:
            if one.place is place:
                why.setdefault(one.why, Counter())[_NUMBER.sub("*", one.tensor)] += 1
        for reason, names in why.items():
            told = [name if count == 1 else f"{name} ({count})" for name, count in names.items()]
            more = f" and {len(told) - LISTED} kinds more" if len(told) > LISTED else ""
            lines.append(f"  {place.value}: {', '.join(told[:LISTED])}{more}: {reason}")
    return lines


def remarks_json(remarks: Iterable[Remark]) -> dict[str, object]:
    """All of them, by kind."""
    remarks = tuple(remarks)
    return {
        place.value: [{"tensor": one.tensor, "why": one.why} for one in remarks if one.place is place]
        for place in Place
    }


def peak_bytes() -> int:
    """The most memory that this process has had so far, or since `forget_peak`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Let `peak_bytes` count from now on; where the system does not allow it, it goes on from the start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
