"""What a person sees while the run goes on: a live table on a terminal, plain lines elsewhere. Rank 0 only.

Both kinds are metric sinks; `enter` fits `Timers(on_enter=...)`.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf.errors import ConfigError
from rlhf.metrics.names import time_name
from rlhf.metrics.status import Progress, Status

SHOWN_STEPS = 8
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """One metric in the table."""

    title: str
    metric: str
    format: str

    def cell(self, values: Mapping[str, float]) -> str:
        """Text of the number; empty where the step has none."""
        value = values.get(self.metric)
        if value is None:
            return ""
        return format(value, self.format) if math.isfinite(value) else str(value)


COLUMNS = (
    Column("loss", "sft/loss", ".4f"),
    Column("reward", "reward/mean", ".3f"),
    Column("held out", "held_out/solved", ".1%"),
    Column("KL", "kl/ref", ".1e"),
    Column("length", "length/response_mean", ".1f"),
    Column("grad norm", "actor/grad_norm", ".2f"),
    Column("grad norm", "sft/grad_norm", ".2f"),
    Column("mismatch", "mismatch/max", ".1e"),
    Column("moved/bound", "sync/bytes_over_bound", ".3f"),
    Column("tok/s", "rate/tokens_per_s", ",.0f"),
    Column("s/step", time_name("step"), ".2f"),
)


class ProgressDisplay(Protocol):
    """A display of either kind, used as a context manager around the run."""

    def __enter__(self) -> Self:
        """Begin to show; a second time does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was, also when the run failed."""

    def enter(self, phase: str) -> None:
        """A phase begins."""

    def note(self, text: str) -> None:
        """Show a message."""

    def goes_on(self, step: int) -> None:
        """The run was done up to a step by an earlier start."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step; step counts from 1."""

    def close(self) -> None:
        """The same as leaving the block."""


def open_display(
    mode: str, num_steps: int, *, progress: Progress | None = None, console: Console | None = None
) -> "LiveDisplay | PlainDisplay":
    """The display for `log.console`: auto (live on a terminal), live or plain.

    Args:
        mode: As the setting.
        num_steps: Steps of the whole run.
        progress: The rank's progress clock, to say what is waited for.
        console: Where to draw; standard output when not given.
    """
    console = console or Console()
    if mode not in ("auto", "live", "plain"):
        raise ConfigError(f"log.console: {mode!r} given; needs auto, live or plain; change it")
    live = console.is_terminal and not console.is_dumb_terminal if mode == "auto" else mode == "live"
    status = Status(num_steps, progress=progress)
    return LiveDisplay(console, status) if live else PlainDisplay(console, status)


class PlainDisplay:
    """One line a step, and one for each phase that takes long; for log files and pipes."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="console", daemon=True)
        self.enter: Callable[[str], None] = status.enter

    def __enter__(self) -> Self:
        """Begin to watch for long phases."""
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self.close()

    def note(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def goes_on(self, step: int) -> None:
        """Count from there."""
        self._status.step = step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step's line."""
        cells = [f"{c.title} {cell}" for c in COLUMNS if (cell := c.cell(values))]
        self._status.step_done(step)
        self.note("  ".join([f"step {step}/{self._status.num_steps}", *cells]))

    def close(self) -> None:
        """Stop watching; calling it again does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def poll(self) -> None:
        """Print the status if it is due."""
        if line := self._status.due():
            self.note(line)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self.poll()


class LiveDisplay:
    """A table of the latest steps above a line with the current phase, redrawn in place."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._rows: tuple[tuple[int, Mapping[str, float]], ...] = ()
        self._spinner = Spinner("dots")
        self._running = False
        self._live = Live(self, console=console, refresh_per_second=4, transient=False, redirect_stderr=False)
        self.enter: Callable[[str], None] = status.enter

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._running:
            return self
        self._running = True
        self._live.start()
        # A rank that is killed cannot bring a hidden cursor back.
        self._console.show_cursor(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw a last time and stop."""
        self.close()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table and, while the run goes on, the status line; called from rich's own thread."""
        rows = self._rows
        if rows:
            yield step_table(rows, self._status.num_steps)
        if self._running:
            self._spinner.update(text=Text(self._status.line(), overflow="ellipsis", no_wrap=True))
            yield self._spinner

    def note(self, text: str) -> None:
        """Print a message above the table."""
        self._console.print(text, markup=False, emoji=False, highlight=False)

    def goes_on(self, step: int) -> None:
        """Count from there."""
        self._status.step = step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step to the table."""
        self._rows = (*self._rows, (step, dict(values)))[-SHOWN_STEPS:]
        self._status.step_done(step)

    def close(self) -> None:
        """Draw a last time, without the status line, and stop; calling it again does nothing."""
        if self._running:
            self._running = False
            self._live.stop()


def step_table(rows: tuple[tuple[int, Mapping[str, float]], ...], num_steps: int) -> Table:
    """Table of steps; a metric that none of them has gets no column."""
    columns = [c for c in COLUMNS if any(c.cell(values) for _, values in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for step, values in rows:
        table.add_row(f"{step}/{num_steps}", *(column.cell(values) for column in columns))
    return table
