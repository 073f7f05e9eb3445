"""The plain text that ends a run: what it has learnt, and where everything is. Knows no console."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.metrics.sparkline import sparkline
from rlhf.metrics.status import duration

WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeAfter:
    """One held-out problem, answered by the first and the last policy."""

    prompt: str
    before: str
    before_reward: float
    after: str
    after_reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalReport:
    """What the report says; a part that does not apply is empty."""

    run_folder: Path
    """Folder of the run."""
    steps: int
    """Steps done."""
    seconds: float
    """Wall-clock seconds of the whole run."""
    solved_before: float = math.nan
    """Share of held-out problems solved before the first step; NaN when not evaluated."""
    solved_after: float = math.nan
    """Share of held-out problems solved after the last step; NaN when not evaluated."""
    problems: int = 0
    """Held-out problems evaluated."""
    rewards: Sequence[float] = ()
    """Mean reward of each step."""
    losses: Sequence[float] = ()
    """Loss of each step."""
    model: str = ""
    """Folder that the trained model was written to; empty when it was not."""
    samples: Sequence[BeforeAfter] = ()
    """Problems to show; the first three are."""
    next_command: str = ""
    """What to try next."""

    def text(self) -> str:
        """The report, several lines."""
        parts = [f"{self.steps} steps in {duration(self.seconds)}"]
        if not math.isnan(self.solved_after):
            parts.append(self._solved())
        parts += [_by_step(name, of) for name, of in (("reward", self.rewards), ("loss", self.losses)) if of]
        parts += [_sample(i, sample) for i, sample in enumerate(self.samples[:3], 1)]
        if self.model:
            parts.append(f"model       {self.model}")
        parts.append(f"run folder  {self.run_folder}")
        if self.next_command:
            parts.append(f"try next    {self.next_command}")
        return "\n".join(parts)

    def _solved(self) -> str:
        of = f" of {self.problems} held-out problems" if self.problems else " of the held-out problems"
        if math.isnan(self.solved_before):
            return f"solved{of}  {self.solved_after:.1%}"
        change = 100 * (self.solved_after - self.solved_before)
        line = f"solved{of}  {self.solved_before:.1%} before, {self.solved_after:.1%} after ({change:+.1f} points"
        if not self.problems:
            return line + ")"
        variance = sum(p * (1 - p) for p in (self.solved_before, self.solved_after)) / self.problems
        return line + f", standard error {100 * math.sqrt(variance):.1f})"


def _by_step(name: str, numbers: Sequence[float]) -> str:
    return f"{name} by step  {numbers[0]:.3f} {sparkline(numbers)} {numbers[-1]:.3f}  (first, last)"


def _sample(number: int, sample: BeforeAfter) -> str:
    return "\n".join(
        [
            f"sample {number}   {_end_of_line(sample.prompt)}",
            f"  before   {_one_line(sample.before)}   reward {sample.before_reward:g}",
            f"  after    {_one_line(sample.after)}   reward {sample.after_reward:g}",
        ]
    )


def _one_line(text: str) -> str:
    """Text on one line, control characters escaped, cut to WIDTH."""
    shown = _printable(text)
    return textwrap.shorten(shown, WIDTH, placeholder=" ...") if " " in shown else shown[:WIDTH]


def _end_of_line(text: str) -> str:
    """As _one_line, but cut at the left: a prompt begins with its chat template, the question stands at its end."""
    shown = _printable(text)
    return shown if len(shown) <= WIDTH else f"... {shown[4 - WIDTH :]}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.strip())
