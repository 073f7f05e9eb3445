"""What a triage has seen of a few sequences; `verdict.py` judges it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.mcore.readings import Reading

DIFFERS = 0.25
"""Rows whose difference is less than this share of the largest row's agree beside them."""
FEWEST = 4
"""Tokens that a hypothesis with something to choose must fit: fewer fit some temperature or neighbour by chance."""


@dataclass(frozen=True, slots=True)
class ReplayedRow:
    """One sequence of the step; all tensors are over its response, [T]."""

    sample_id: int
    prompt_tokens: int
    is_drawn: bool
    """Chosen at random; else because it was among the worst."""
    responses: Tensor
    """int64."""
    counts: Tensor
    """bool: drawn by the version that is compared."""
    rollout_logprobs: Tensor
    """The engine's."""
    old_logprobs: Tensor
    """The trainer's, as the step had them."""
    alone: Tensor
    """The trainer's, with the row alone in its forward pass."""

    @property
    def used(self) -> Tensor:
        """bool: tokens of which a difference can be taken."""
        return self.counts & self.rollout_logprobs.isfinite() & self.old_logprobs.isfinite() & self.alone.isfinite()


def differing(rows: Sequence[ReplayedRow], *, spare: int = 0) -> tuple[int, ...]:
    """Which rows differ; the others say nothing of the cause where one engine of several has a fault.

    All, where those have too few tokens, `spare` of each row not counted.
    """
    apart = [rms([(row.rollout_logprobs - row.old_logprobs)[row.used]]) for row in rows]
    found = tuple(at for at, size in enumerate(apart) if size >= DIFFERS * max(apart))
    tokens = sum(max(0, int(rows[at].used.sum()) - spare) for at in found)
    return found if tokens >= FEWEST else tuple(range(len(rows)))


def rms(parts: Sequence[Tensor]) -> float:
    """Root mean square over all values; 0 without any."""
    values = torch.cat(list(parts)) if parts else torch.empty(0)
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Again:
    """An engine's new answer to the prompt of one of the rows, and the trainer's score of it, alone."""

    engine: int
    """First rank of the engine."""
    row: int
    """Which of the replayed rows."""
    responses: Tensor
    """int64 [T']."""
    rollout_logprobs: Tensor
    """float32 [T']."""
    trainer: Tensor
    """float32 [T']."""


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Engines' weights against the actor's, element by element."""

    was_possible: bool
    """False where engines had given their weights back, or one was lost; they were sent again before the replay."""
    tensors: tuple[str, ...] = ()
    """Logical tensors that differ."""
    of: int = 0
    """Logical tensors in all."""
    text: str = ""
    """The first blocks that differ, with their checksums."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the verdict rests on."""

    rows: tuple[ReplayedRow, ...]
    readings: Mapping[Reading, tuple[Tensor, ...]]
    """The trainer's log-probs of each row's response under other readings of its logits, each row alone."""
    alone: tuple[Again, ...]
    """Prompts asked one at a time."""
    together: tuple[Again, ...]
    """The same prompts in one batch."""
    weights: WeightCheck
    step_mean: float
    """Mean |difference| over all tokens of the step that were compared."""
    sampling: Reading
    """As the config has it; the log-probs of both sides are without renormalisation."""
    lost_engines: int = 0
    """Lost while it was looked into; they were replaced, and what they had not said by then may be missing."""
