"""The typed batches of a step: PromptBatch -> Rollout -> ScoredRollout -> ShapedRollout -> Experience.

Every field has one entry per row: a tensor with the rows in dim 0, a Ragged, a tuple, or an earlier batch. Shape
letters: B = rows on this rank, T = tokens of a row's response.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from rlhf.data.ragged import Ragged
from rlhf.data.record import PromptRecord, RewardResult
from rlhf.data.table import Table, column


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
class PromptBatch(Table):
    """Prompts waiting for a response; a prompt sampled n times is n rows."""

    sample_ids: Tensor = column(torch.int64)
    """int64 [B], unique in the run."""
    prompt_ids: Tensor = column(torch.int64)
    """int64 [B], equal for the samples of one prompt."""
    tokens: Ragged = column(torch.int64)
    """int64, the prompt."""
    records: tuple[PromptRecord, ...]


@dataclass(frozen=True, slots=True)
class Rollout(Table):
    """Prompts with one sampled response each."""

    prompts: PromptBatch
    responses: Ragged = column(torch.int64)
    """int64 [sum T], the stop token included when one was sampled."""
    rollout_logprobs: Ragged = column(torch.float32)
    """float32 [sum T], under the sampling distribution (temperature applied; top-p / top-k cut not renormalised)."""
    finish_reasons: Tensor = column(torch.int8)
    """int8 [B], FinishReason."""
    provenance: Ragged = column(torch.uint8)
    """uint8 [sum T], Provenance."""
    policy_versions: Ragged = column(torch.int32)
    """int32 [sum T], version of the weights that sampled each token."""

    @staticmethod
    def unanswered(prompts: PromptBatch) -> "Rollout":
        """Rows that no engine was asked for: one token each that was not sampled, the prompt's last, of version -1."""
        rows, last = len(prompts), prompts.tokens.lengths.cumsum(0) - 1
        ones = torch.ones(rows, dtype=torch.int64)
        return Rollout(
            prompts=prompts,
            responses=Ragged(prompts.tokens.values[last], ones),
            rollout_logprobs=Ragged(torch.zeros(rows), ones),
            finish_reasons=torch.full((rows,), FinishReason.ABORT, dtype=torch.int8),
            provenance=Ragged(torch.full((rows,), Provenance.TEMPLATE, dtype=torch.uint8), ones),
            policy_versions=Ragged(torch.full((rows,), -1, dtype=torch.int32), ones),
        )


@dataclass(frozen=True, slots=True)
class ScoredRollout(Table):
    """Responses with their rewards."""

    rollout: Rollout
    scores: Tensor = column(torch.float32)
    """float32 [B]."""
    valid: Tensor = column(torch.bool)
    """bool [B]; False rows take part in no loss."""
    results: tuple[RewardResult, ...]


@dataclass(frozen=True, slots=True)
class ShapedRollout(Table):
    """Responses with what is learned from their scores."""

    scored: ScoredRollout
    adjusted: Tensor = column(torch.float32)
    """float32 [B]. Score after the rules for truncated, short and long responses, before normalisation."""
    rewards: Tensor = column(torch.float32)
    """float32 [B]. Normalised and clipped; it lands on the response's last token."""
    counts: Tensor = column(torch.bool)
    """bool [B]; False rows take part in no loss: invalid ones, and truncated ones that are masked."""


@dataclass(frozen=True, slots=True)
class Sequences(Table):
    """What a model needs to score responses: prompt and response as one sequence."""

    sample_ids: Tensor = column(torch.int64)
    """int64 [B]."""
    tokens: Ragged = column(torch.int64)
    """int64 [sum (P+T)]."""
    response_lengths: Tensor = column(torch.int64)
    """int64 [B]; the last so many tokens of a row are its response."""


@dataclass(frozen=True, slots=True)
class TokenScores(Table):
    """One number per response token, from a model: log-probs, or values."""

    scores: Ragged = column(torch.float32)
    """float32 [sum T]."""


@dataclass(frozen=True, slots=True)
class PolicyRows(Table):
    """What the policy loss needs, and nothing more. Token fields are aligned with the responses."""

    sequences: Sequences
    old_logprobs: Ragged = column(torch.float32)
    advantages: Ragged = column(torch.float32)
    loss_mask: Ragged = column(torch.bool)


@dataclass(frozen=True, slots=True)
class ValueRows(Table):
    """What the value loss needs, and nothing more. Token fields are aligned with the responses."""

    sequences: Sequences
    values: Ragged = column(torch.float32)
    returns: Ragged = column(torch.float32)
    loss_mask: Ragged = column(torch.bool)


@dataclass(frozen=True, slots=True)
class Experience(Table):
    """All that the losses need. Token fields are aligned with the responses."""

    shaped: ShapedRollout
    old_logprobs: Ragged = column(torch.float32)
    ref_logprobs: Ragged = column(torch.float32)
    values: Ragged = column(torch.float32)
    rewards: Ragged = column(torch.float32)
    """Per-token reward, KL penalty included."""
    advantages: Ragged = column(torch.float32)
    """Whitened over the global batch when the config asks for it."""
    returns: Ragged = column(torch.float32)
    loss_mask: Ragged = column(torch.bool)
    """bool; True on tokens that count in the loss."""

    @property
    def scored(self) -> ScoredRollout:
        """Responses with their scores."""
        return self.shaped.scored
