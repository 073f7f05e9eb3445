"""A small file that each rank rewrites every few seconds: alive, doing what, and where. Knows no torch.

The beat comes from a thread, so a rank in a long computation still beats; one that was stopped or has died does not.
Ticks are counted apart: a rank that beats without ticking is alive but hangs.
"""

import json
import linecache
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import psutil

from rlhf.dist.progress_clock import ProgressClock

RUNNING, FINISHED, FAILED, TERMINATED = "running", "finished", "failed", "terminated"
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What one rank says about itself."""

    rank: int
    host: str
    machine: str
    """Where pid is valid: tells hosts, and containers on one host, apart even when their names are equal."""
    pid: int
    started: float
    """Start of the process, in seconds since the epoch: tells it from a later one with the same pid."""
    number: int = 0
    """Grows with every beat."""
    ticks: int = 0
    """Grows with progress."""
    phase: str = "start"
    idle_s: float = 0.0
    """Seconds since the last tick."""
    where: str = ""
    """Line that the main thread is at."""
    waits: bool = False
    """It waits for other ranks."""
    children: tuple[int, ...] = ()
    """Process ids of its descendants."""
    state: str = RUNNING
    """running; finished, failed or terminated when it said goodbye."""

    @property
    def title(self) -> str:
        """`rank 2 (host node7, pid 4711)`."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def doing(self) -> str:
        """`in phase rollout at rlhf/rollout/x.py:12 decode`."""
        return f"in phase {self.phase}" + (f" at {self.where}" if self.where else "")


@cache
def this_machine() -> str:
    """The running kernel and the namespace of process ids in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def beat_path(run_folder: Path, rank: int) -> Path:
    """File of a rank's beats."""
    return run_folder / "heartbeat" / f"rank_{rank}.json"


def read_beat(path: Path) -> Beat | None:
    """The last beat, or None when there is none yet."""
    try:
        fields = json.loads(path.read_text())
        return Beat(**{**fields, "children": tuple(fields["children"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def read_beats(run_folder: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
    """The last beat of every rank, or every one of `ranks`, that has one; by rank."""
    paths = (run_folder / "heartbeat").glob("rank_*.json")
    found = (read_beat(path) for path in (paths if ranks is None else (beat_path(run_folder, r) for r in ranks)))
    return sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank)


def process_state(beat: Beat) -> str:
    """Of the beat's process: running, stopped or dead; unknown when it lives on another machine."""
    return state_of(beat.pid, beat.started) if beat.machine == this_machine() else "unknown"


def state_of(pid: int, started: float) -> str:
    """Of a process of this machine that began at `started` (seconds since the epoch): running, stopped or dead."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - started) > 2.0:  # the pid belongs to somebody else by now
            return "dead"
        status = process.status()
    except psutil.NoSuchProcess:
        return "dead"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def main_thread_place() -> tuple[str, bool, bool]:
    """Line the main thread is at, whether it waits for other ranks, and whether a debugger holds it.

    It waits when it is inside a function of torch.distributed, or at a line that calls some `.wait(`: that of a posted
    transfer is C code and has no frame of its own.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place, collective, debugged = "", False, False
    while frame is not None:
        file = frame.f_code.co_filename
        collective |= file.endswith(_COLLECTIVES)
        debugged |= file.endswith(("bdb.py", "pydevd.py"))
        if not place and f"{os.sep}torch{os.sep}" not in file and file != __file__:
            short = os.sep.join(file.split(os.sep)[-3:])
            line = frame.f_lineno or frame.f_code.co_firstlineno  # Python has None between two lines
            collective |= ".wait(" in linecache.getline(file, line)
            place = f"{short}:{line} {frame.f_code.co_name}"
        frame = frame.f_back
    return place, collective, debugged


class Heart:
    """Writes this rank's beats."""

    def __init__(self, run_folder: Path, *, rank: int, host: str, clock: ProgressClock) -> None:
        self._path = beat_path(run_folder, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._process = psutil.Process()
        self._clock = clock
        self._lock = threading.RLock()
        self.last = Beat(
            rank=rank,
            host=host,
            machine=this_machine(),
            pid=self._process.pid,
            started=self._process.create_time(),
        )

    def beat(self, state: str | None = None) -> Beat:
        """Write one beat and return it; a state given once stays."""
        with self._lock:
            place, collective, debugged = main_thread_place()
            self.last = replace(
                self.last,
                number=self.last.number + 1,
                ticks=self._clock.ticks,
                phase=self._clock.what,
                idle_s=0.0 if debugged else self._clock.idle_s,
                where=place,
                waits=collective or self._clock.declared_waiting,
                children=tuple(child.pid for child in self._process.children(recursive=True)),
                state=state or self.last.state,
            )
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(asdict(self.last)))
            fresh.replace(self._path)
            return self.last
