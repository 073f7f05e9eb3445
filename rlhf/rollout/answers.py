"""Rows on their way between leaders: what is asked, and what was answered. Tables that travel, so without records."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batch import FinishReason, PromptBatch, Rollout
from rlhf.data.ragged import Ragged
from rlhf.data.record import PromptRecord
from rlhf.data.table import Table, column

_NO_RECORD = PromptRecord("", "", {})


@dataclass(frozen=True, slots=True)
class Asked(Table):
    """Prompts waiting for a response; fields as in PromptBatch."""

    sample_ids: Tensor = column(torch.int64)
    prompt_ids: Tensor = column(torch.int64)
    tokens: Ragged = column(torch.int64)

    @staticmethod
    def of(prompts: PromptBatch) -> "Asked":
        """Without the records, which engines do not read."""
        return Asked(prompts.sample_ids.cpu(), prompts.prompt_ids.cpu(), prompts.tokens.to(torch.device("cpu")))

    def prompts(self) -> PromptBatch:
        """For an engine: with empty records."""
        return PromptBatch(self.sample_ids, self.prompt_ids, self.tokens, (_NO_RECORD,) * len(self))


@dataclass(frozen=True, slots=True)
class Answers(Table):
    """Responses, whole or as far as they have come; fields as in Rollout."""

    sample_ids: Tensor = column(torch.int64)
    prompt_ids: Tensor = column(torch.int64)
    responses: Ragged = column(torch.int64)
    rollout_logprobs: Ragged = column(torch.float32)
    finish_reasons: Tensor = column(torch.int8)
    provenance: Ragged = column(torch.uint8)
    policy_versions: Ragged = column(torch.int32)

    @staticmethod
    def of(rollout: Rollout) -> "Answers":
        """Without the prompts."""
        prompts = rollout.prompts
        return Answers(
            prompts.sample_ids,
            prompts.prompt_ids,
            rollout.responses,
            rollout.rollout_logprobs,
            rollout.finish_reasons,
            rollout.provenance,
            rollout.policy_versions,
        )

    @staticmethod
    def none_yet(asked: Asked) -> "Answers":
        """Rows that were not begun."""
        zeros = torch.zeros(len(asked), dtype=torch.int64)
        empty = [torch.empty(0, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.uint8, torch.int32)]
        responses, logprobs, provenance, versions = (Ragged(values, zeros) for values in empty)
        aborted = torch.full((len(asked),), FinishReason.ABORT, dtype=torch.int8)
        return Answers(asked.sample_ids, asked.prompt_ids, responses, logprobs, aborted, provenance, versions)

    def rollout(self, prompts: PromptBatch) -> Rollout:
        """With their prompts, which must be of these samples in this order."""
        assert torch.equal(prompts.sample_ids.cpu(), self.sample_ids), "answers to other samples"
        return Rollout(
            prompts,
            self.responses,
            self.rollout_logprobs,
            self.finish_reasons,
            self.provenance,
            self.policy_versions,
        )

    def ordered_as(self, sample_ids: Tensor) -> "Answers":
        """Rows in the order of sample_ids (int64 [any]), each of which must be here; different ones."""
        order = self.sample_ids.argsort()
        return self.select(order[torch.searchsorted(self.sample_ids[order], sample_ids)])
