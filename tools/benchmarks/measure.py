"""Seconds of several runs, and how much memory processes took. Standard library only: every side uses it."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

TICK_S = 0.5
"""How often memory is looked at. The kernel keeps each process's peak: only what lives shorter than this is missed."""


_CPUCLOCK_SCHED = 2
"""Of the kernel's clocks of a process, that of the scheduler; `clock_getcpuclockid` of the C library gives it too."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Seconds of repeated runs of one thing, warm-up left out."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median; 0 for one run."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_s(pid: int) -> float:
    """Processor seconds that a process has taken so far, all its threads, by the kernel's clock of it; 0 for none."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:  # it has ended
        return 0.0


class PeakMemory:
    """Peak resident memory of a process and all that it starts, in MiB.

    At each look, the kernel's peaks of all processes that live are added up; the greatest sum is the result. So peaks
    of different processes that do not coincide count as if they did, and pages that processes share count in each.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._peak_kib = pid, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> int:
        """Take one more look; the peak so far, in MiB."""
        self._peak_kib = max(self._peak_kib, sum(_peak_kib(pid) for pid in family(self._pid)))
        return round(self._peak_kib / 1024)

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            self.look()


def family(pid: int) -> list[int]:
    """The process and its descendants that live."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for task in _list(f"/proc/{one}/task"):
            waiting += [int(child) for child in _read(f"/proc/{one}/task/{task}/children").split()]
    return found


def _peak_kib(pid: int) -> int:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process has ended
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
