"""What the processes of one engine leave in its folder for those who watch them: who they are, a pulse, how one ended.

Written by SGLang's processes and by the host around them, read by the leader rank. Imports the standard library alone:
the host may run in another environment than the job.
"""

import asyncio
import json
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOST = "host"
HEED_S = 1.0
"""How long a process that raised waits before it says so. What it raised may follow from another's death, and the host
leaves word of that well within this time, however loaded the machine."""
_STATE = struct.Struct("<qq")
"""Of a pulse: rounds, whether it awaits others."""
_SIZE = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One process of an engine."""

    role: str
    """host, or scheduler tp R."""
    pid: int
    born: int
    """Start of the process in the kernel's ticks: tells it from a later one with the same pid."""
    pulse: int = 0
    """Rounds of its event loop so far; 0: it has none yet."""
    awaits: bool = False
    """It is in a collective, where it waits for the slowest of its kind."""

    @property
    def title(self) -> str:
        """`scheduler tp 1 (pid 4711)`."""
        return f"{self.role} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended, or that it raised."""

    pid: int
    at_ns: int
    """On the machine's monotonic clock."""
    how: str


class Pulse:
    """This process's own entry, and the counter in it."""

    def __init__(self, role: str, folder: Path | None = None) -> None:
        """Enter this process. `folder`: the engine's; default: where this process has its temporary files."""
        folder = folder or Path(tempfile.gettempdir())
        path, pid = folder / f"process_{os.getpid()}", os.getpid()
        told = json.dumps({"role": role, "pid": pid, "born": stat_of(pid)[1]}).encode()
        path.with_suffix(".part").write_bytes(_STATE.pack(0, 0) + told.ljust(_SIZE))
        with path.with_suffix(".part").open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _STATE.size + _SIZE)
        path.with_suffix(".part").rename(path)
        self._rounds = 0

    def beat(self) -> None:
        """One more round; costs less than a microsecond."""
        self._rounds += 1
        _STATE.pack_into(self._memory, 0, self._rounds, 0)

    def await_others(self, awaits: bool) -> None:
        """Whether this process waits for others of its kind now; as cheap."""
        _STATE.pack_into(self._memory, 0, self._rounds, awaits)

    async def keep_beating(self, *, every_s: float = 1.0) -> None:
        """As long as the event loop that runs this goes round."""
        while True:
            self.beat()
            await asyncio.sleep(every_s)


def read_entries(folder: Path) -> list[Entry]:
    """Of all processes that have entered themselves, ended ones too; in the order of their pids."""
    found = []
    for path in folder.glob("process_*[0-9]"):
        try:
            told = path.read_bytes()
        except FileNotFoundError:  # the folder is being removed
            continue
        rounds, awaits = _STATE.unpack_from(told)
        found.append(Entry(**json.loads(told[_STATE.size :]), pulse=rounds, awaits=bool(awaits)))
    return sorted(found, key=lambda entry: entry.pid)


def read_ends(folder: Path) -> list[End]:
    """The first one first."""
    found = []
    for path in folder.glob("end_*[0-9]"):
        try:
            found.append(End(**json.loads(path.read_text())))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda end: end.at_ns)


def write_end(pid: int, how: str, folder: Path | None = None) -> None:
    """Leave word of how a process ended; the first word about it stays."""
    path = (folder or Path(tempfile.gettempdir())) / f"end_{pid}"
    part = path.with_suffix(f".{os.getpid()}_{threading.get_ident()}_part")
    part.write_text(json.dumps(asdict(End(pid, time.monotonic_ns(), how))))
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


def write_raised(error: BaseException, folder: Path | None = None) -> None:
    """Leave word of an exception that ends this process, after a moment: deaths that may have led to it come first.

    Others hear of it by this process's end alone, so nobody is ended on its account before.
    """
    time.sleep(HEED_S)
    write_end(os.getpid(), f"raised {type(error).__name__}: {error}", folder)


def after_the_dead(end_all: Callable[..., None]) -> Callable[..., None]:
    """The same, a moment later: in the host, so that there is word of who ended before all are ended on its account."""

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(HEED_S / 2)
        end_all(*args, **kwargs)

    return late


def watch_children(folder: Path | None = None, *, every_s: float = 0.1) -> None:
    """In the host: from now on, leave word of how each process that enters itself ends. By threads, and reaps none.

    SGLang ends its host when a child is lost, and the child's exit status goes with it.
    """
    folder = folder or Path(tempfile.gettempdir())

    def search() -> None:
        known = {os.getpid()}
        while True:
            for entry in read_entries(folder):
                if entry.pid not in known:
                    known.add(entry.pid)
                    _in_background(lambda pid=entry.pid: _await_end(pid, folder))  # type: ignore[misc]  # a default
            time.sleep(every_s)

    _in_background(search)


def stat_of(pid: int) -> tuple[str, int, float]:
    """(state letter of the kernel, start in ticks, seconds of processor time) of a process; ("", 0, 0.0): gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0, 0.0
    return fields[0], int(fields[19]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _await_end(pid: int, folder: Path) -> None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        write_end(pid, "ended", folder)
        return
    assert ended is not None, "it blocks until there is one"
    was_killed = ended.si_code != os.CLD_EXITED
    write_end(pid, f"was ended by signal {ended.si_status}" if was_killed else f"left with {ended.si_status}", folder)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rlhf-children", daemon=True).start()
