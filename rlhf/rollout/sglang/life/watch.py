"""Whether the processes of an engine live, from outside: dead, stopped, or still when they should move.

A process that uses the processor is alive, however long it takes: a long prompt on a slow CPU is no hang. One that
neither goes round its event loop nor computes for `STILL_S` hangs.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhf.rollout.sglang.life.board import HOST, read_ends, read_entries, stat_of

STILL_S = 15.0
"""A process that should move and did nothing for so long hangs."""
STOPPED_LOOKS = 2
"""A process is stopped when so many looks in a row find it so: tools stop one for an instant to look into it."""
_LONGEST_GAP_S = 2.0
"""A longer time between two looks counts as so much: this process may have been stopped itself."""
_GONE = ("", "Z", "X")
_WAITS_FOR_MACHINE = ("R", "D")
"""For a processor that others use, or for a disk: no hang, however little it does."""
_IDLE_SHARE = 0.02
"""Less processor time than this share is what background threads use."""


class Watched:
    """One process, looked at again and again."""

    def __init__(self, title: str, pid: int, born: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._pid, self._born, self._clock = title, pid, born, clock
        self._last, self._rounds = clock(), -1
        self._cpu_s, self._still_s, self._num_stopped = 0.0, 0.0, 0

    def fault(self, rounds: int | None = None) -> str:
        """What is wrong with it, by its name; "" while nothing is.

        rounds: Of its event loop so far, where it should move now; a process without a count is told by processor time
            alone. None: it may rest.
        """
        state, born, cpu_s = stat_of(self._pid)
        if state in _GONE or born != self._born:
            return f"{self._title} died"
        self._num_stopped = self._num_stopped + 1 if state == "T" else 0
        if self._num_stopped >= STOPPED_LOOKS:
            return f"{self._title} is stopped (state T)"
        now = self._clock()
        gap_s = min(now - self._last, _LONGEST_GAP_S)
        if rounds is None or rounds != self._rounds or state in _WAITS_FOR_MACHINE:
            self._still_s, self._cpu_s = 0.0, cpu_s
        else:
            self._still_s += gap_s
            if cpu_s - self._cpu_s > max(0.05, _IDLE_SHARE * self._still_s):
                self._still_s, self._cpu_s = 0.0, cpu_s
        self._last, self._rounds = now, -1 if rounds is None else rounds
        if self._still_s >= STILL_S:
            return f"{self._title} hangs: it has not moved for {self._still_s:.0f} s (state {state})"
        return ""

    def end(self) -> None:
        """Kill it, if it is still there and not this process itself."""
        if self._pid != os.getpid() and stat_of(self._pid)[1] == self._born:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


@dataclass(slots=True)
class EngineWatch:
    """All processes of an engine, by what they left in its folder."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, Watched] | None = None

    def fault(self, *, should_move: bool) -> str:
        """The first thing that is wrong, with the name of the process; "" while nothing is.

        should_move: Event loops that have begun must go round, or compute.
        """
        if ended := self.first_end():
            return ended
        entries = read_entries(self.folder)
        seen = self._seen = self._seen or {}
        found = []
        for entry in entries:
            watched = seen.setdefault(entry.pid, Watched(entry.title, entry.pid, entry.born, clock=self.clock))
            found.append(watched.fault(entry.pulse if should_move and entry.pulse else None))
        # A host that is gone takes the others with it; one of the others may end the host.
        wrong = [(entry.role != HOST, text) for entry, text in zip(entries, found, strict=True) if text]
        return min(wrong)[1] if wrong else ""

    def first_end(self) -> str:
        """How the first of them ended of which there is word; "" without any."""
        titles = {entry.pid: entry.title for entry in read_entries(self.folder)}
        return next((f"{titles[end.pid]} {_named(end.how)}" for end in read_ends(self.folder) if end.pid in titles), "")

    def living(self) -> list[int]:
        """Process ids of those that are still there."""
        found = [(entry.pid, entry.born, *stat_of(entry.pid)) for entry in read_entries(self.folder)]
        return [pid for pid, wanted, state, born, _ in found if born == wanted and state not in _GONE]


def how_ended(code: int) -> str:
    """Of a process, by its return code as subprocess has it."""
    return _named(f"was ended by signal {-code}" if code < 0 else f"left with {code}")


def _named(how: str) -> str:
    """With the signal's name in the place of its number."""
    before, by, number = how.partition("by signal ")
    return f"{before}{by.removesuffix('signal ')}{signal.Signals(int(number)).name}" if number else how
