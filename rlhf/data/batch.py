"""The typed batches that flow through a step: PromptBatch -> Rollout -> ScoredRollout -> Experience.

Every field has one entry per row: a tensor with the rows in dim 0, a Ragged, a tuple, or an earlier batch. Shape
letters: B = rows on this rank, T = tokens of a row's response.
"""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from rlhf.data.ragged import Ragged
from rlhf.data.table import Table


class FinishReason(IntEnum):
    """Why a response ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2


class Provenance(IntEnum):
    """Where a response token came from."""

    SAMPLED = 0
    TOOL = 1
    TEMPLATE = 2


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
class PromptBatch(Table):
    """Prompts waiting for a response; a prompt sampled n times is n rows."""

    sample_ids: Tensor
    """int64 [B], unique in the run."""
    prompt_ids: Tensor
    """int64 [B], equal for the samples of one prompt."""
    tokens: Ragged
    """int64, the prompt."""
    records: tuple[PromptRecord, ...]


@dataclass(frozen=True, slots=True)
class Rollout(Table):
    """Prompts with one sampled response each."""

    prompts: PromptBatch
    responses: Ragged
    """int64 [sum T], the stop token included when one was sampled."""
    rollout_logprobs: Ragged
    """float32 [sum T], under the sampling distribution (temperature applied; top-p / top-k cut not renormalised)."""
    finish_reasons: Tensor
    """int8 [B], FinishReason."""
    provenance: Ragged
    """uint8 [sum T], Provenance."""
    policy_versions: Ragged
    """int32 [sum T], version of the weights that sampled each token."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Outcome of one reward call."""

    score: float
    parts: tuple[tuple[str, float], ...] = ()
    """Named components, for logs."""
    error: str = ""
    """What went wrong; empty when nothing did. A failed row has score 0."""


@dataclass(frozen=True, slots=True)
class ScoredRollout(Table):
    """Responses with their rewards."""

    rollout: Rollout
    scores: Tensor
    """float32 [B]."""
    valid: Tensor
    """bool [B]; False rows take part in no loss."""
    results: tuple[RewardResult, ...]


@dataclass(frozen=True, slots=True)
class Sequences(Table):
    """What a model needs to score responses: prompt and response as one sequence."""

    sample_ids: Tensor
    """int64 [B]."""
    tokens: Ragged
    """int64 [sum (P+T)]."""
    response_lengths: Tensor
    """int64 [B]; the last so many tokens of a row are its response."""


@dataclass(frozen=True, slots=True)
class Experience(Table):
    """All that the losses need. Token fields are aligned with the responses."""

    scored: ScoredRollout
    old_logprobs: Ragged
    ref_logprobs: Ragged
    values: Ragged
    rewards: Ragged
    """Per-token reward, KL penalty included."""
    advantages: Ragged
    """Whitened over the global batch when the config asks for it."""
    returns: Ragged
    loss_mask: Ragged
    """bool; True on tokens that count in the loss."""
