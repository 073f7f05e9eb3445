"""What a person asks of an engine, as rows of tokens; what cannot be answered is named by its place."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

from rlhf.config.rollout import SamplingConfig
from rlhf.errors import DataError

WHERE = "generate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a prompt and its response must fit into."""

    vocab_size: int
    max_length: int
    """The model's longest sequence."""
    kv_cache_tokens: int


def prompt_rows(
    prompts: Iterable[str | Sequence[int]],
    sampling: SamplingConfig,
    *,
    encode: Callable[[int, str], list[int]],
    room: Room,
) -> list[list[int]]:
    """Token ids of each prompt; `encode` gives those of a text, with its place.

    Raises:
        DataError: One is no text and no token ids, has none or one outside the vocabulary, or is too long.
    """
    if isinstance(prompts, str):
        raise DataError(f"{WHERE}: one text given; needs a list of prompts; put it in brackets")
    if outside := [one for one in sampling.stop_token_ids if not 0 <= one < room.vocab_size]:
        raise DataError(
            f"{WHERE}: sampling.stop_token_ids = {outside}; the model has 0..{room.vocab_size - 1}, so nothing would "
            "stop there; needs ids of the model's tokenizer; change it"
        )
    found = []
    for number, prompt in enumerate(prompts):
        row = encode(number, prompt) if isinstance(prompt, str) else _token_ids(number, prompt)
        _check_vocabulary(number, row, room.vocab_size)
        _check_length(number, len(row), sampling.max_new_tokens, room)
        found.append(row)
    return found


def positive(name: str, given: object) -> int:
    """A number of answers.

    Raises:
        DataError: It is none.
    """
    try:
        found = index(given)  # type: ignore[arg-type]  # what is none is refused
    except TypeError:
        found = 0
    if found < 1:
        raise DataError(f"{WHERE}: {name} = {given!r}; needs a whole number of at least 1; change it")
    return found


def _token_ids(number: int, prompt: Sequence[int]) -> list[int]:
    """Python's integers or those of arrays; torch would cut off what is behind a point."""
    try:
        if isinstance(prompt, bytes | bytearray):
            raise TypeError("a text that is not decoded")
        return [index(one) for one in prompt]
    except TypeError as error:
        raise DataError(
            f"{WHERE}: prompt {number} is {prompt!r:.80}; needs a text or a list of token ids; change it, and put a "
            "prompt that is alone in brackets"
        ) from error


def _check_vocabulary(number: int, row: list[int], vocab_size: int) -> None:
    if outside := [one for one in row if not 0 <= one < vocab_size]:
        raise DataError(
            f"{WHERE}: prompt {number} has token {outside[0]}; the model has 0..{vocab_size - 1}; use the tokenizer of "
            "the model's own folder"
        )


def _check_length(number: int, num_tokens: int, max_new_tokens: int, room: Room) -> None:
    if not num_tokens:
        raise DataError(f"{WHERE}: prompt {number} is empty; needs at least one token; leave it out")
    for limit, what, cure in (
        (room.max_length, f"{room.max_length} together, the model's longest sequence", "shorten it"),
        (room.kv_cache_tokens, f"kv_cache_tokens = {room.kv_cache_tokens} together", "open the engine with more"),
    ):
        if num_tokens + max_new_tokens > limit:
            raise DataError(
                f"{WHERE}: prompt {number} has {num_tokens} tokens and may get max_new_tokens = {max_new_tokens} more; "
                f"needs at most {what}; {cure}, or lower max_new_tokens"
            )
