"""How a rank that fails leaves: its words into its log, a record, its children ended, os._exit. No collective."""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

import psutil

from rlhf.dist.exit_record import ExitCode, ExitRecord, claim, exit_path, failure_path, read_record, write_over
from rlhf.dist.heartbeat import FAILED, TERMINATED, Beat, Heart, process_state
from rlhf.dist.rank_logs import RankLogs
from rlhf.dist.watchdog import Blame, PeerView, dead_peer
from rlhf.errors import CheckpointError, ConfigError, DataError, LayoutError, PeerLostError, SaveError

_CONSEQUENCE = re.compile(r"gloo|nccl|connection|socket|timed out|peer|rendezvous|store", re.IGNORECASE)
_KEEPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")  # free shared memory once their users are gone


def end_children(*, but: Collection[int] = ()) -> None:
    """Kill the descendants of this process, but for those that free shared memory and then leave by themselves."""
    _kill(psutil.Process().children(recursive=True), but)


def end_tree(pid: int, *, patience_s: float = 10.0) -> None:
    """Kill a process and its descendants, with the same exceptions, and wait until they are gone."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    psutil.wait_procs(_kill(tree), timeout=patience_s)


def _kill(processes: Iterable[psutil.Process], but: Collection[int] = ()) -> list[psutil.Process]:
    """Those that were killed."""
    killed = []
    for process in processes:
        if process.pid in but:
            continue
        try:
            if not any(keeper in part for part in process.cmdline() for keeper in _KEEPERS):
                process.kill()
                killed.append(process)
        except psutil.NoSuchProcess:
            continue
    return killed


class Ending:
    """The ways out of a job for one rank, other than its good end. The first one taken is the only one."""

    def __init__(
        self,
        run_folder: Path,
        *,
        heart: Heart,
        logs: RankLogs,
        peers: Callable[[], list[PeerView]],
        launcher: int,
        patience_s: float,
    ) -> None:
        """Nothing happens yet.

        Args:
            run_folder: Where the records go.
            heart: This rank's beats.
            logs: This rank's log.
            peers: What the watchdog sees of other ranks.
            launcher: Process id of scripts/launch.sh, which completes exit.json; 0 without one.
            patience_s: A rank that lost a connection waits this long for somebody to tell why.
        """
        self._run_folder, self._heart, self._logs, self._peers = run_folder, heart, logs, peers
        self._launcher, self._patience_s = launcher, patience_s
        self._leaving = threading.Lock()

    def raised(self, error: BaseException) -> NoReturn:
        """The rank's own code raised; or it raised because another rank is gone, which is then named."""
        text = "".join(traceback.format_exception(error))
        blame = self._cause() if self._may_be_consequence(error) else None
        if blame is not None:
            self._fail(self._blaming(blame), text)
        bad_input = isinstance(error, ConfigError | LayoutError | DataError | CheckpointError)
        own = self._heart.beat()
        reason = f"{type(error).__name__}: {error}"
        code = ExitCode.BAD_INPUT if bad_input else ExitCode.RANK_FAILED
        record = ExitRecord(code=code, reason=reason, rank=own.rank, reporter=own.rank, phase=own.phase)
        self._fail(record, text, shown=str(error) if bad_input or isinstance(error, SaveError) else text)

    def blamed(self, blame: Blame) -> NoReturn:
        """The watchdog found a rank that is lost or hangs; called on its thread."""
        self._logs.write("---- every thread of this rank ----")
        self._logs.dump_stacks()
        own, blamed = self._heart.last, blame.beat
        stacks = _main_stack() if blamed.rank == own.rank else ""
        self._fail(self._blaming(blame), f"{stacks}{blame.reason}\n", kills=blamed if blame.silent else None)

    def followed(self) -> NoReturn:
        """Another rank has ended the job, and nobody has ended this one; called on the watchdog's thread."""
        record = read_record(exit_path(self._run_folder))
        why = "unknown" if record is None else record.reason
        own = self._heart.last
        reason = f"another rank had ended the job: {why}"
        self._fail(
            ExitRecord(code=ExitCode.RANK_FAILED, reason=reason, rank=own.rank, reporter=own.rank, phase=own.phase),
            reason,
        )

    def terminated(self) -> NoReturn:
        """SIGTERM came: from the launcher because another rank failed, or because somebody ends the job."""
        self._leaving.acquire()
        blame = dead_peer(self._peers())
        if blame is not None:
            self._announce(self._blaming(blame), f"{blame.reason}\n")
        elif not self._launcher:
            claim(self._run_folder, ExitRecord(code=ExitCode.RANK_FAILED, reason="ended by SIGTERM"))
        elif _is_gone(self._launcher):  # nobody else is left to tell
            reason = f"the launcher on host {self._heart.last.host} was killed"
            claim(self._run_folder, ExitRecord(code=ExitCode.RANK_FAILED, reason=reason))
        self._logs.write("ended by SIGTERM")
        self._heart.beat(TERMINATED)
        end_children()
        os._exit(143)

    def _may_be_consequence(self, error: BaseException) -> bool:
        if isinstance(error, PeerLostError):
            return True
        return isinstance(error, RuntimeError) and _CONSEQUENCE.search(str(error)) is not None

    def _cause(self) -> Blame | None:
        """A rank that died without a word, seen before long; None when another rank has told why already.

        Meanwhile the watchdog goes on, and ends this process when it finds the rank on another host that is silent.
        """
        until = time.monotonic() + self._patience_s  # a killed process closes its connections before it counts as dead
        while time.monotonic() < until and read_record(exit_path(self._run_folder)) is None:
            blame = dead_peer(self._peers())
            if blame is not None:
                return blame
            time.sleep(0.05)
        return None

    def _blaming(self, blame: Blame) -> ExitRecord:
        beat: Beat = blame.beat
        return ExitRecord(
            code=ExitCode.RANK_FAILED,
            reason=blame.reason,
            rank=beat.rank,
            reporter=self._heart.last.rank,
            phase=beat.phase,
        )

    def _fail(self, record: ExitRecord, text: str, *, shown: str = "", kills: Beat | None = None) -> NoReturn:
        self._leaving.acquire()
        self._announce(record, text, shown=shown)
        if kills is not None and process_state(kills) in ("running", "stopped"):
            os.kill(kills.pid, signal.SIGKILL)  # torchrun would wait 30 s for a stopped process to hear SIGTERM
        self._heart.beat(FAILED)
        end_children()
        os._exit(record.code)

    def _announce(self, record: ExitRecord, text: str, *, shown: str = "") -> None:
        """Write the log and the records; the first rank of the job to get here shows it on the console."""
        self._logs.write(text)
        write_over(failure_path(self._run_folder, self._heart.last.rank), record)
        if claim(self._run_folder, record):
            self._logs.alarm(shown or text)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _main_stack() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "Main thread (most recent call last):\n" + "".join(traceback.format_stack(frame))
