"""An endless, addressable stream of training prompts, and held-out ones that never appear in it."""

from dataclasses import dataclass
from typing import Protocol

from rlhf.data.prompt_encoder import Prompt


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows of a source."""

    source: str
    rows: int
    """Rows read, good or bad; for a generated task, problems in one epoch."""
    usable: int
    """Rows trained on; for a generated task, problems in one epoch."""
    held_out: int
    bad: int
    """Rows that could not be used."""
    overlong: int
    """Rows dropped for their length; for a generated task, so far."""
    repeats: int
    """Rows left out of training because a held-out one asks the same; for a generated task, so far."""
    examples: tuple[str, ...] = ()
    """The first bad rows, `file:line: what was found`."""

    def __str__(self) -> str:
        text = (
            f"{self.source}: {self.rows} rows, {self.usable} to train on, {self.held_out} held out, "
            f"{self.bad} bad, {self.overlong} overlong, {self.repeats} repeats of held-out ones"
        )
        return "\n".join([text, *(f"  {example}" for example in self.examples)])


class Problems(Protocol):
    """Where prompts come from."""

    def train(self, position: int) -> Prompt:
        """The training prompt at a position of the endless stream (0, 1, ...); a pure function of it and the seed."""
        ...

    def held_out(self) -> tuple[Prompt, ...]:
        """Prompts for evaluation, distinct, none of which `train` ever gives; the same for every seed."""
        ...

    def report(self) -> DataReport:
        """What became of the rows."""
        ...
