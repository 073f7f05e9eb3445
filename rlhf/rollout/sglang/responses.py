"""SGLang's answers, after a look at what they say of themselves."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from rlhf.data.batch import FinishReason
from rlhf.errors import EngineError
from rlhf.rollout.ledger import Ledger, OwedRow
from rlhf.rollout.sglang.wire import Response

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens of a row."""

    tokens: Tensor
    """int64, on the CPU."""
    logprobs: Tensor
    """float32."""
    reason: FinishReason


def answer_of(
    row: OwedRow, response: Response, *, max_new_tokens: int, version: str, may_be_aborted: bool = False
) -> Answer:
    """A row's answer; `version` is that of the weights that must have made it, `max_new_tokens` that of the sampling.

    Raises:
        EngineError: SGLang refused the row, it was made by other weights, or it was cut short. Out of memory for its
            keys and values, SGLang aborts a row by itself, which must not pass for a response.
    """
    where = f"sglang engine: sample {row.sample_id}"
    if response.error:
        raise EngineError(f"{where}: SGLang did not answer: {response.error}; see the engine's log")
    if response.reason == "abort" and not may_be_aborted:
        raise EngineError(
            f"{where} was aborted by SGLang, though nobody had asked for it; needs room for its keys and values; see "
            "the engine's log, raise rollout.kv_cache_tokens"
        )
    if others := sorted({name for name, _ in response.versions} - {version}):
        raise EngineError(
            f"{where} was made by weights of version {', '.join(others)}; needs those of the last update, {version}; "
            "an update did not reach the engine"
        )
    tokens = _unpacked(response.tokens, torch.int32).long()
    made, count = sum(count for _, count in response.versions), tokens.numel()
    if made != count:
        raise EngineError(f"{where}: SGLang tells versions of {made} tokens, but gave {count}")
    if response.reason == "length" and row.num_begun + count != max_new_tokens:
        raise EngineError(
            f"{where}: SGLang cut it after {row.num_begun + count} tokens; needs sampling.max_new_tokens = "
            f"{max_new_tokens}; raise rollout.kv_cache_tokens"
        )
    return Answer(tokens, _unpacked(response.logprobs, torch.float32), _REASONS[response.reason])


def _unpacked(packed: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=dtype) if packed else torch.empty(0, dtype=dtype)


def report_times(ledger: Ledger, response: Response) -> None:
    """Tell when a row that is about to end began and had its first token, by SGLang's own clock.

    A row that was never begun with (aborted in the queue) has waited until its end.
    """
    times = response.times
    if isfinite(times.begun):
        ledger.began([response.number], at=times.begun)
    if isfinite(times.first_token) and response.tokens:
        ledger.have_first_token([response.number], at=times.first_token)
