"""Sampled tokens as they come, step by step, and the rollout they add up to."""

import torch
from torch import Tensor

from rlhf.data.batch import FinishReason, PromptBatch, Provenance, Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineError
from rlhf.rollout.engine import ProgressFn


class Responses:
    """Growing responses of `num_rows` rows. Steps are kept as they are and sorted into rows once, at the end."""

    def __init__(self, num_rows: int, *, on_progress: ProgressFn | None) -> None:
        self._num_rows, self._num_finished, self._on_progress = num_rows, 0, on_progress
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._reasons = torch.full((num_rows,), FinishReason.ABORT, dtype=torch.int8)

    def add(self, indices: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """One more token of the rows at indices (int64), which are not written to afterwards."""
        self._steps.append((indices, tokens, logprobs))

    def finish(self, indices: list[int], stopped: list[bool]) -> None:
        """These rows are complete, by a stop token or by length."""
        for index, by_token in zip(indices, stopped, strict=True):
            self._reasons[index] = FinishReason.STOP if by_token else FinishReason.LENGTH
        self._num_finished += len(indices)

    def report(self) -> None:
        """Tell whoever wants to know how far this is."""
        if self._on_progress is not None:
            self._on_progress(self._num_finished, self._num_rows)

    def rollout(self, prompts: PromptBatch, *, policy_version: int) -> Rollout:
        """The rows with their prompts, on the CPU.

        Raises:
            EngineError: A log-prob is not a number.
        """
        empty = [torch.empty(0, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.float32)]
        columns = [torch.cat(c).cpu() for c in zip(*self._steps, strict=True)] or empty
        indices, tokens, logprobs = columns
        if not bool(logprobs.isfinite().all()):
            row = int(indices[~logprobs.isfinite()][0])
            raise EngineError(
                f"native engine: sample {int(prompts.sample_ids[row])} got a log-prob that is not finite; needs finite "
                f"weights; look at the update before policy version {policy_version}"
            )
        order = indices.argsort(stable=True)
        lengths = indices.bincount(minlength=self._num_rows)
        count = indices.numel()
        return Rollout(
            prompts=prompts,
            responses=Ragged(tokens[order], lengths),
            rollout_logprobs=Ragged(logprobs[order], lengths),
            finish_reasons=self._reasons,
            provenance=Ragged(torch.full((count,), Provenance.SAMPLED, dtype=torch.uint8), lengths),
            policy_versions=Ragged(torch.full((count,), policy_version, dtype=torch.int32), lengths),
        )
