"""Whether the processes of an engine live, from outside: dead, stopped, or still when they should move.

A process that uses the processor is alive, however long it takes: a long prompt on a slow CPU is no hang. One that
neither goes round its event loop nor computes for `STILL_S` hangs, unless it waits in a collective for one that does.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.rollout.sglang.life.board import HOST, Entry, read_ends, read_entries, stat_of
from rlhf.rollout.sglang.life.patience import Patience

STILL_S = 15.0
"""A process that should move and did nothing for so long hangs."""
STOPPED_LOOKS = 2
"""A process is stopped when so many looks in a row find it so: tools stop one for an instant to look into it."""
_GONE = ("", "Z", "X")
_WAITS_FOR_MACHINE = ("R", "D")
"""For a processor that others use, or for a disk: no hang, however little it does."""
_IDLE_SHARE = 0.02
"""Less processor time than this share is what background threads use."""


class Watched:
    """One process, looked at again and again."""

    def __init__(self, title: str, pid: int, born: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.state = ""
        """The kernel's letter for it, at the last look."""
        self._pid, self._born, self._rounds = pid, born, -1
        self._still, self._cpu_s, self._num_stopped = Patience(STILL_S, clock=clock), 0.0, 0

    def fault(self, rounds: int | None = None) -> str:
        """What is wrong with it, by its name; "" while nothing is.

        rounds: Of its event loop so far, where it should move now; a process without a count is told by processor time
            alone. None: it may rest.
        """
        if wrong := self.look(rounds):
            return wrong
        if self.still_s >= STILL_S:
            return f"{self.title} hangs: {self.stillness}"
        return ""

    def look(self, rounds: int | None = None) -> str:
        """A look: whether it died or was stopped, as `fault`; how long it has been still is in `still_s`."""
        self.state, born, cpu_s = stat_of(self._pid)
        if self.state in _GONE or born != self._born:
            return f"{self.title} died"
        self._still.is_over()
        if self._still.was_held_up:  # all may have been stopped, and go on one after the other
            self._num_stopped = 0
        self._num_stopped = self._num_stopped + 1 if self.state == "T" else 0
        if self._num_stopped >= STOPPED_LOOKS:
            return f"{self.title} is stopped (state T)"
        moves = rounds is None or rounds != self._rounds or self.state in _WAITS_FOR_MACHINE
        if moves or cpu_s - self._cpu_s > max(0.05, _IDLE_SHARE * self.still_s):
            self._still.begin_anew()
            self._cpu_s = cpu_s
        self._rounds = -1 if rounds is None else rounds
        return ""

    @property
    def still_s(self) -> float:
        """For how long it has done nothing, though it should."""
        return self._still.waited_s

    @property
    def stillness(self) -> str:
        """In words."""
        return f"it has not moved for {self.still_s:.0f} s (state {self.state})"

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

        should_move: Event loops that have begun must go round, or compute, or wait for another scheduler that does.
        """
        if ended := self.first_end():
            return ended
        entries = read_entries(self.folder)
        seen = self._seen = self._seen or {}
        gone, looked = [], []
        for entry in entries:
            watched = seen.setdefault(entry.pid, Watched(entry.title, entry.pid, entry.born, clock=self.clock))
            if text := watched.look(entry.pulse if should_move and entry.pulse else None):
                gone.append((entry.role != HOST, text))
            looked.append((entry, watched))
        # A host that is gone takes the others with it; one of the others may end the host.
        return min(gone)[1] if gone else _hung(looked)

    def first_end(self) -> str:
        """How the first of them ended of which there is word; "" without any."""
        titles = {entry.pid: entry.title for entry in read_entries(self.folder)}
        return next((f"{titles[end.pid]} {_named(end.how)}" for end in read_ends(self.folder) if end.pid in titles), "")

    def living(self) -> list[int]:
        """Process ids of those that are still there."""
        found = [(entry.pid, entry.born, *stat_of(entry.pid)) for entry in read_entries(self.folder)]
        return [pid for pid, wanted, state, born, _ in found if born == wanted and state not in _GONE]


def _hung(looked: Sequence[tuple[Entry, Watched]]) -> str:
    """Which process keeps all waiting, if one does.

    A scheduler in a collective waits for the slowest one: it is to blame only if all of them do that.
    """
    still = [(entry, watched) for entry, watched in looked if watched.still_s >= STILL_S]
    if to_blame := [watched for entry, watched in still if not entry.awaits]:
        return f"{to_blame[0].title} hangs: {to_blame[0].stillness}"
    schedulers = [watched for entry, watched in looked if entry.role != HOST]
    if still and len(still) == len(schedulers):
        titles = " and ".join(watched.title for watched in schedulers)
        return f"{titles}: all have waited for others of their engine for {still[0][1].still_s:.0f} s"
    return ""


def how_ended(code: int) -> str:
    """Of a process, by its return code as subprocess has it."""
    return _named(f"was ended by signal {-code}" if code < 0 else f"left with {code}")


def _named(how: str) -> str:
    """With the signal's name in the place of its number."""
    before, by, number = how.partition("by signal ")
    return f"{before}{by.removesuffix('signal ')}{signal.Signals(int(number)).name}" if number else how
