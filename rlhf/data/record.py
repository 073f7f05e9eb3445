"""What a reward function is handed and what it returns. Imports no torch, so that reward processes start fast."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """What a reward function may want to know of a prompt, beside its tokens."""

    text: str
    """The prompt as the model sees it, template included."""
    answer: str
    """Reference answer, or empty."""
    entry: dict[str, object]
    """The data row the prompt came from."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Outcome of one reward call."""

    score: float
    parts: tuple[tuple[str, float], ...] = ()
    """Named components, for logs."""
    error: str = ""
    """What went wrong; empty when nothing did. A failed row has score 0."""
