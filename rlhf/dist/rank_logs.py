"""Where a rank's words go: logs/rank_<r>.log for everything, the console for rank 0's prints and for alarms."""

import faulthandler
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO


def log_path(run_folder: Path, rank: int) -> Path:
    """A rank's log file; later runs in the same folder append to it."""
    return run_folder / "logs" / f"rank_{rank}.log"


class _ConsoleHandler(logging.StreamHandler):
    """Writes to what sys.stdout is at the moment, so that a live table may put itself between."""

    def __init__(self, rank_0: bool, console: TextIO) -> None:
        super().__init__(console)
        self._rank_0 = rank_0

    def emit(self, record: logging.LogRecord) -> None:
        if self._rank_0:
            self.stream = sys.stdout
        super().emit(record)


class RankLogs:
    """Turns file descriptors 1 and 2 to the rank's log file, so that what C code and children print is kept too.

    Python's sys.stdout stays the console on rank 0 and is the log file elsewhere; sys.stderr is the log file on all.
    `console` is the terminal (or file) the job was started from, on every rank.
    """

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.path = log_path(run_folder, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._old_streams = (sys.stdout, sys.stderr)
        for stream in self._old_streams:
            stream.flush()
        self._old_fds = (os.dup(1), os.dup(2))
        self.console = os.fdopen(os.dup(self._old_fds[0]), "w", buffering=1)
        self._log = open(self.path, "a", buffering=1)  # noqa: SIM115  # lives as long as the job
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        sys.stdout = self.console if rank == 0 else self._log
        sys.stderr = self._log
        self._log.write(f"==== rank {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ====\n")
        faulthandler.enable(file=self._log, all_threads=True)
        self._handlers = self._install_handlers()

    def _install_handlers(self) -> tuple[logging.Handler, ...]:
        text = f"%(asctime)s [rank {self._rank}] %(levelname)s %(name)s: %(message)s"
        to_file = logging.StreamHandler(self._log)
        to_console = _ConsoleHandler(self._rank == 0, self.console)
        to_console.setLevel(logging.WARNING if self._rank == 0 else logging.ERROR)
        to_console.addFilter(lambda record: record.name.startswith("rlhf"))
        root = logging.getLogger()
        self._old_level = root.level
        root.setLevel(logging.INFO)
        for handler in (to_file, to_console):
            handler.setFormatter(logging.Formatter(text))
            root.addHandler(handler)
        return to_file, to_console

    def write(self, text: str) -> None:
        """Add text to the log."""
        self._log.write(text if text.endswith("\n") else text + "\n")

    def alarm(self, text: str) -> None:
        """Show text on the console, each line with the rank's tag."""
        tagged = "".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines())
        self.console.write(tagged)
        self.console.flush()

    def dump_stacks(self) -> None:
        """Write every thread's Python stack into the log."""
        faulthandler.dump_traceback(file=self._log, all_threads=True)

    def close(self) -> None:
        """Give streams and descriptors back."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
        root.setLevel(self._old_level)
        for fd, old in zip((1, 2), self._old_fds, strict=True):
            os.dup2(old, fd)
            os.close(old)
        sys.stdout, sys.stderr = self._old_streams
        faulthandler.disable()
        self.console.close()
        self._log.close()
