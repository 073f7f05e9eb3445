"""Rewards of 1 or 0: does the response give the reference answer?"""

from rlhf.data.record import PromptRecord
from rlhf.reward.extract import last_number, same_number, tagged, whole


def score(record: PromptRecord, text: str) -> float:
    """1 when the response, without white space around it, is the reference answer."""
    return float(whole(text) == whole(record.answer))


def score_last_number(record: PromptRecord, text: str) -> float:
    """1 when the last number of the response equals the last number of the reference answer (as GSM8K writes it)."""
    return float(same_number(last_number(text), last_number(record.answer)))


def score_tagged(record: PromptRecord, text: str) -> float:
    """1 when what the response marks as its answer equals the reference answer, marked likewise or bare."""
    given, wanted = tagged(text), tagged(record.answer) or whole(record.answer)
    return float(bool(given) and (given == wanted or same_number(given, wanted)))
