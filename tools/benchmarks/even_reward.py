"""The reward of the PPO benchmark: the share of even token ids in a response. Free to compute, easy to learn."""

from functools import cache

from tokenizers import Tokenizer

from rlhf.data.record import PromptRecord


def score(record: PromptRecord, text: str) -> float:
    """Share of even ids in the response's text, cut into tokens again by the tokenizer that the row names."""
    ids = _tokenizer(str(record.entry["tokenizer"])).encode(text, add_special_tokens=False).ids
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


@cache
def _tokenizer(file: str) -> Tokenizer:
    return Tokenizer.from_file(file)
