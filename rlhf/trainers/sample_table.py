"""All rows of a step, as they travel between ranks and as they lie in a Parquet file."""

import json
from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor

from rlhf.data.batch import Experience, FinishReason
from rlhf.data.ragged import Ragged
from rlhf.data.table import Table, column


@dataclass(frozen=True, slots=True)
class SampleRows(Table):
    """Rows that can travel: texts and reward parts are JSON in `facts`. Token fields follow the responses."""

    sample_ids: Tensor = column(torch.int64)
    prompt_ids: Tensor = column(torch.int64)
    prompts: Ragged = column(torch.int64)
    responses: Ragged = column(torch.int64)
    finish_reasons: Tensor = column(torch.int8)
    policy_versions: Ragged = column(torch.int32)
    rollout_logprobs: Ragged = column(torch.float32)
    old_logprobs: Ragged = column(torch.float32)
    ref_logprobs: Ragged = column(torch.float32)
    values: Ragged = column(torch.float32)
    token_rewards: Ragged = column(torch.float32)
    advantages: Ragged = column(torch.float32)
    returns: Ragged = column(torch.float32)
    loss_mask: Ragged = column(torch.bool)
    scores: Tensor = column(torch.float32)
    rewards: Tensor = column(torch.float32)
    valid: Tensor = column(torch.bool)
    counts: Tensor = column(torch.bool)
    facts: Ragged = column(torch.uint8)
    """UTF-8 JSON: prompt, response, answer, error, parts."""

    @staticmethod
    def of(experience: Experience, texts: list[str]) -> "SampleRows":
        """Rows of this rank's experience; `texts` are its responses."""
        scored, rollout = experience.scored, experience.scored.rollout
        facts = [
            {
                "prompt": record.text,
                "response": text,
                "answer": record.answer,
                "error": result.error,
                "parts": dict(result.parts),
            }
            for record, text, result in zip(rollout.prompts.records, texts, scored.results, strict=True)
        ]
        return SampleRows(
            sample_ids=rollout.prompts.sample_ids,
            prompt_ids=rollout.prompts.prompt_ids,
            prompts=rollout.prompts.tokens,
            responses=rollout.responses,
            finish_reasons=rollout.finish_reasons,
            policy_versions=rollout.policy_versions,
            rollout_logprobs=rollout.rollout_logprobs,
            old_logprobs=experience.old_logprobs,
            ref_logprobs=experience.ref_logprobs,
            values=experience.values,
            token_rewards=experience.rewards,
            advantages=experience.advantages,
            returns=experience.returns,
            loss_mask=experience.loss_mask,
            scores=scored.scores,
            rewards=experience.shaped.rewards,
            valid=scored.valid,
            counts=experience.shaped.counts,
            facts=Ragged.of(
                [torch.frombuffer(bytearray(json.dumps(of).encode()), dtype=torch.uint8) for of in facts],
                dtype=torch.uint8,
            ),
        )

    def to_arrow(self, step: int) -> pa.Table:
        """One line a response; the columns are listed in rlhf/metrics/README.md."""
        facts = [json.loads(bytes(row.numpy())) for row in self.facts.rows()]
        last = [int(row[-1]) if len(row) else None for row in self.policy_versions.rows()]
        counted = [row[mask] for row, mask in zip(self.advantages.rows(), self.loss_mask.rows(), strict=True)]
        return pa.table(
            {
                "step": pa.array([step] * len(self), pa.int32()),
                "sample_id": self.sample_ids.numpy(),
                "prompt_id": self.prompt_ids.numpy(),
                **{
                    name: pa.array([of[name] for of in facts], pa.string()) for name in ("prompt", "response", "answer")
                },
                "prompt_length": self.prompts.lengths.numpy(),
                "response_length": self.responses.lengths.numpy(),
                "finish_reason": pa.array(
                    [FinishReason(int(r)).name.lower() for r in self.finish_reasons], pa.string()
                ),
                "policy_version": pa.array(last, pa.int32()),
                "score": self.scores.numpy(),
                "reward": self.rewards.numpy(),
                "reward_parts": pa.array(
                    [list(of["parts"].items()) for of in facts], pa.map_(pa.string(), pa.float64())
                ),
                "error": pa.array([of["error"] for of in facts], pa.string()),
                "valid": self.valid.numpy(),
                "counts": self.counts.numpy(),
                "advantage_mean": pa.array([float(row.mean()) if len(row) else None for row in counted], pa.float32()),
                "prompt_tokens": _lists(self.prompts, torch.int32),
                "response_tokens": _lists(self.responses, torch.int32),
                "policy_versions": _lists(self.policy_versions, torch.int32),
                "rollout_logprobs": _lists(self.rollout_logprobs),
                "old_logprobs": _lists(self.old_logprobs),
                "ref_logprobs": _lists(self.ref_logprobs),
                "values": _lists(self.values),
                "token_rewards": _lists(self.token_rewards),
                "advantages": _lists(self.advantages),
                "returns": _lists(self.returns),
                "loss_mask": _lists(self.loss_mask),
            }
        )


def _lists(ragged: Ragged, dtype: torch.dtype | None = None) -> pa.ListArray:
    values = ragged.values.to(dtype or ragged.values.dtype)
    return pa.ListArray.from_arrays(ragged.cu_seqlens.to(torch.int32).numpy(), pa.array(values.numpy()))
