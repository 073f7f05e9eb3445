"""Rewards by reasoning_gym's own scorers, for prompts from data.source=reasoning_gym.

A scorer gives 1 for a right answer and, in most tasks, a little for one that merely holds it. The functions differ in
what they take for the answer, and `solved` in giving nothing for less than a right one.
"""

import json
from functools import lru_cache

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import create_dataset

from rlhf.data.record import PromptRecord
from rlhf.reward.extract import last_number, tagged, whole


def score(record: PromptRecord, text: str) -> float:
    """Score of the response itself, without white space around it."""
    return _score(record, whole(text))


def solved(record: PromptRecord, text: str) -> float:
    """1 when the scorer finds the response right, else 0: a policy cannot collect partial credit by saying more."""
    return float(score(record, text) == 1.0)


def score_last_number(record: PromptRecord, text: str) -> float:
    """Score of the last number in the response."""
    return _score(record, last_number(text))


def solved_last_number(record: PromptRecord, text: str) -> float:
    """1 when the last number in the response is right, whatever is said around it, else 0."""
    return float(score_last_number(record, text) == 1.0)


def score_tagged(record: PromptRecord, text: str) -> float:
    """Score of what the response marks as its answer; see rlhf.reward.extract.tagged."""
    return _score(record, tagged(text))


def _score(record: PromptRecord, answer: str) -> float:
    scorer = _scorer(str(record.entry["task"]), json.dumps(record.entry["task_options"]))
    return float(scorer.score_answer(answer, record.entry))


@lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> ProceduralDataset:
    return create_dataset(task, seed=0, size=1, **json.loads(options))
