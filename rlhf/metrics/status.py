"""What a run is doing right now, in one line. Pure but for the clock; may be read from another thread."""

import time
from collections.abc import Callable
from typing import Protocol

QUIET_S = 60.0  # without progress for this long, the line says what the run waits for
LONG_PHASE_S = 30.0  # a phase longer than this is worth a line where lines are not redrawn


class Progress(Protocol):
    """Where loops tick; the progress clock of a rank is one."""

    @property
    def what(self) -> str:
        """What is being done, or waited for."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last tick."""


class Status:
    """Step, phase and latest progress of this rank.

    Args:
        num_steps: Steps of the whole run.
        progress: Read whenever the line is made; without it, a new phase is the only sign of progress.
        clock: Seconds, never falling.
    """

    def __init__(
        self, num_steps: int, *, progress: Progress | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step = 0
        self.num_steps = num_steps
        self._progress = progress
        self._clock = clock
        self._told_at = clock()
        # One tuple, replaced as a whole, so that a reader in another thread sees a phase with its own time.
        self._phase = ("starting", self._told_at)

    def enter(self, phase: str) -> None:
        """A phase begins; empty is the time between phases."""
        self._told_at = self._clock()
        self._phase = (phase or "between phases", self._told_at)

    def step_done(self, step: int) -> None:
        """Step number `step` (from 1) has ended."""
        self.step = step
        self.enter("")

    def line(self) -> str:
        """Where the run is, how long the phase has lasted, and after QUIET_S without progress what it waits for."""
        phase, since = self._phase
        lasted = self._clock() - since
        what, quiet = (self._progress.what, self._progress.idle_s) if self._progress else ("", lasted)
        detail = "" if what in phase else what
        at = f"step {min(self.step + 1, self.num_steps)}/{self.num_steps}: {phase} {duration(lasted)}"
        if quiet >= QUIET_S:
            return f"{at}, no progress for {duration(quiet)}; waits for {detail or phase}"
        return f"{at}, {detail}" if detail else at

    def due(self) -> str | None:
        """The line when it is time to print it again: LONG_PHASE_S into a phase, then each time its age has doubled."""
        _, since = self._phase
        now = self._clock()
        if now - since < max(LONG_PHASE_S, 2 * (self._told_at - since)):
            return None
        self._told_at = now
        return self.line()


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4 s, 3 min 5 s, 2 h 10 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
