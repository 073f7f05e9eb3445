"""Which prompts an engine can answer at all; every engine asks before it queues one."""

from collections.abc import Sequence

from torch import Tensor

from rlhf.errors import EngineError
from rlhf.rollout.stopping import Decode


def check_vocabulary(tokens: Tensor, lengths: Tensor, sample_ids: Tensor, *, vocab_size: int, where: str) -> None:
    """Raise EngineError at a token outside the vocabulary: padding rows of the embedding would take it in silence."""
    outside = (tokens < 0) | (tokens >= vocab_size)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        row = int((lengths.cumsum(0) <= at).sum())
        raise EngineError(
            f"{where}: sample {int(sample_ids[row])} has prompt token {int(tokens[at])}; the model has "
            f"0..{vocab_size - 1}; use the tokenizer of the model's own folder"
        )


def check_fits(num_tokens: int, max_new_tokens: int, kv_cache_tokens: int, *, sample_id: int, where: str) -> None:
    """Raise EngineError unless a prompt and its response can be held at all."""
    if num_tokens == 0:
        raise EngineError(f"{where}: sample {sample_id} has an empty prompt; needs at least one token; drop it")
    if num_tokens + max_new_tokens > kv_cache_tokens:
        raise EngineError(
            f"{where}: sample {sample_id} needs {num_tokens} prompt tokens + sampling.max_new_tokens = "
            f"{max_new_tokens}, but rollout.kv_cache_tokens = {kv_cache_tokens}; raise it, or shorten one of the others"
        )


def check_can_stop(stop: Sequence[str], decode: Decode | None, *, where: str) -> None:
    """Raise EngineError where strings are to end a response, and nobody could tell what it says."""
    if stop and decode is None:
        raise EngineError(
            f"{where}: sampling.stop = {list(stop)}, but the engine was made without a tokenizer; needs `decode`; "
            "hand it in, or end responses by sampling.stop_token_ids"
        )
