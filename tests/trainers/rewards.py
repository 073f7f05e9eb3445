"""Reward functions of tiny runs, apart from them: every reward process of every rank imports this file."""

from rlhf.data.record import PromptRecord
from tests.reward.functions import Shuffled


def count_low_bytes(record: PromptRecord, text: str) -> float:
    """A reward that varies between samples: the share of characters below the middle of ASCII."""
    return sum(ord(c) < 64 for c in text) / max(1, len(text)) + 0.01 * len(record.text)


def fails(record: PromptRecord, text: str) -> float:
    """A reward that never answers."""
    raise ValueError("no reward today")


def same_parity(record: PromptRecord, text: str) -> float:
    """1 when the first character of the response is as even or odd as the digit that ends the prompt."""
    return float(bool(text) and ord(text[0]) % 2 == int(record.answer) % 2)


def same_parity_shuffled(record: PromptRecord, text: str) -> float:
    """The parity score of some earlier response: as many points, tied to nothing."""
    return _shuffled(record, text)


_shuffled = Shuffled(same_parity)
