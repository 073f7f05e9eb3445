"""One row of a data source, checked: a prompt, perhaps an answer, and all else that stood in the row."""

import json
from dataclasses import dataclass

from rlhf.data.permutation import stable_hash
from rlhf.errors import DataError

Messages = list[dict[str, str]]
"""A chat: each message has a role and a content."""


class BadRowError(DataError):
    """One row that cannot be used; the source counts and skips it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that passed the checks."""

    prompt: str | Messages
    answer: str
    """Empty when the row has none."""
    entry: dict[str, object]
    """The row as it was read."""


def row_of(entry: object, *, prompt_key: str, answer_key: str) -> Row:
    """Check what was read from a file.

    Raises:
        BadRowError: It is no object, has no usable prompt, or its answer is neither text nor number.
    """
    if not isinstance(entry, dict):
        raise BadRowError(f"a {type(entry).__name__} where an object with a field {prompt_key!r} is needed")
    if prompt_key not in entry:
        raise BadRowError(f"no field {prompt_key!r}; it has {', '.join(map(repr, sorted(entry))) or 'none'}")
    prompt, answer = entry[prompt_key], entry.get(answer_key)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRowError(f"field {prompt_key!r} is empty")
    else:
        check_messages(prompt, prompt_key)
    if answer is None:
        answer = ""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise BadRowError(f"field {answer_key!r} is a {type(answer).__name__}; needs text or a number")
    return Row(prompt, str(answer), entry)


def check_messages(prompt: object, prompt_key: str) -> None:
    """Raise BadRowError unless prompt is a chat that ends with somebody else than the assistant."""
    if not isinstance(prompt, list) or not prompt:
        raise BadRowError(
            f"field {prompt_key!r} is {'an empty list' if prompt == [] else f'a {type(prompt).__name__}'}; "
            "needs text or a list of messages"
        )
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRowError(
                f"field {prompt_key!r} holds {message!r:.80}; a message needs a role and a content, both text"
            )
    if not any(message["content"].strip() for message in prompt):
        raise BadRowError(f"field {prompt_key!r} has only empty messages")
    if prompt[-1]["role"] == "assistant":
        raise BadRowError(f"field {prompt_key!r} ends with the assistant's message; there is nothing to answer")


def content_key(prompt: str | Messages) -> int:
    """64-bit hash of what is asked: equal for equal prompts, whatever white space surrounds them.

    A chat of one user message equals its bare text.
    """
    if isinstance(prompt, str):
        return stable_hash("user", prompt.strip())
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return content_key(prompt[0]["content"])
    return stable_hash("chat", json.dumps([(m["role"], m["content"].strip()) for m in prompt]))
