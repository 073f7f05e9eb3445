"""SGLang's answers as a `Rollout`, after a look at what they say of themselves."""

from collections.abc import Sequence
from math import isfinite

import torch

from rlhf.data.batch import FinishReason, PromptBatch, Provenance, Rollout
from rlhf.data.ragged import Ragged
from rlhf.errors import EngineError
from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.sglang.wire import Response

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def rollout_of(
    prompts: PromptBatch, responses: Sequence[Response], *, max_new_tokens: Sequence[int], version: str
) -> Rollout:
    """The prompts with their responses, in one order; `version` is that of the weights that must have made them.

    Raises:
        EngineError: A log-prob is not finite, a response was made by other weights, or it was cut short.
    """
    for sample_id, one, most in zip(prompts.sample_ids.tolist(), responses, max_new_tokens, strict=True):
        _check(sample_id, one, most, version)
    lengths = torch.tensor([len(one.tokens) for one in responses], dtype=torch.int64)
    count = int(lengths.sum())
    tokens = torch.tensor([token for one in responses for token in one.tokens], dtype=torch.int64)
    logprobs = torch.tensor([logprob for one in responses for logprob in one.logprobs], dtype=torch.float32)
    if not bool(logprobs.isfinite().all()):
        row = int((lengths.cumsum(0) <= int((~logprobs.isfinite()).nonzero()[0])).sum())
        raise EngineError(
            f"sglang engine: sample {int(prompts.sample_ids[row])} got a log-prob that is not finite; needs finite "
            f"weights; look at the update before policy version {version}"
        )
    return Rollout(
        prompts=prompts,
        responses=Ragged(tokens, lengths),
        rollout_logprobs=Ragged(logprobs, lengths),
        finish_reasons=torch.tensor([_REASONS[one.reason] for one in responses], dtype=torch.int8),
        provenance=Ragged(torch.full((count,), Provenance.SAMPLED, dtype=torch.uint8), lengths),
        policy_versions=Ragged(torch.full((count,), int(version), dtype=torch.int32), lengths),
    )


def report_times(monitor: PerformanceMonitor, prompts: PromptBatch, responses: Sequence[Response]) -> None:
    """Tell the monitor of rows that have ended, as SGLang tells it, by its own clock.

    A row that was never begun with (aborted in the queue) has waited until its end.
    """
    rows = zip(prompts.sample_ids.tolist(), prompts.tokens.lengths.tolist(), responses, strict=True)
    for sample_id, prompt_tokens, one in rows:
        times = one.times
        if isfinite(times.received):
            monitor.submitted([sample_id], at=times.received)
        if isfinite(times.begun):
            monitor.begun([sample_id], at=times.begun)
        if isfinite(times.first_token) and one.tokens:
            monitor.first_token([sample_id], at=times.first_token)
        monitor.ended(
            sample_id,
            prompt_tokens=prompt_tokens,
            response_tokens=len(one.tokens),
            cached_tokens=one.cached_tokens,
            at=times.ended if isfinite(times.ended) else None,
        )


def _check(sample_id: int, response: Response, max_new_tokens: int, version: str) -> None:
    where, made = f"sglang engine: sample {sample_id}", sum(count for _, count in response.versions)
    if others := sorted({name for name, _ in response.versions} - {version}):
        raise EngineError(
            f"{where} was made by weights of version {', '.join(others)}; needs those of the last update, {version}; "
            "an update did not reach the engine"
        )
    if made != len(response.tokens):
        raise EngineError(f"{where}: SGLang tells versions of {made} tokens, but gave {len(response.tokens)}")
    if response.reason == "length" and len(response.tokens) != max_new_tokens:
        raise EngineError(
            f"{where}: SGLang cut it after {len(response.tokens)} tokens; needs sampling.max_new_tokens = "
            f"{max_new_tokens}; raise rollout.kv_cache_tokens"
        )
