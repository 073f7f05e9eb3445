"""Reward functions that behave as told: the response text names what to do."""

import contextlib
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache

from rlhf.data.record import PromptRecord, RewardResult


def act(record: PromptRecord, text: str) -> object:
    """Do what the text says; a number is its own score."""
    verb, _, rest = text.partition(" ")
    return ACTIONS[verb](record, rest) if verb in ACTIONS else float(text)


class Shuffled:
    """Gives each response the true score of some other response: the same scores, tied to nothing."""

    def __init__(self, score: Callable[[PromptRecord, str], float], *, pool: int = 64) -> None:
        self.score, self.pool, self.random, self.held = score, pool, random.Random(0), []

    def __call__(self, record: PromptRecord, text: str) -> float:
        """Put this score into the pool and take an older one out."""
        mine = self.score(record, text)
        if len(self.held) < self.pool:
            older = self.random.choice(self.held) if self.held else 0.0
            self.held.append(mine)
            return older
        at = self.random.randrange(self.pool)
        older, self.held[at] = self.held[at], mine
        return older


def shuffled(record: PromptRecord, text: str) -> float:
    """reasoning_gym's score of another response."""
    return _shuffled_gym()(record, text)


@cache
def _shuffled_gym() -> Shuffled:
    from rlhf.reward import gym  # takes a second, which the other functions need not wait for

    return Shuffled(gym.score)


def _raise(record, rest):
    raise KeyError(rest)


def _print(record, rest):
    for _ in range(2000):
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
    return 5.0


def _spin(record, rest):
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def _child(record, rest):
    child = subprocess.Popen(["sleep", "300"])
    with open(rest, "w") as file:
        file.write(str(child.pid))
    time.sleep(300)


ACTIONS = {
    "raise": _raise,
    "exit": lambda record, rest: sys.exit(3),
    "print": _print,
    "spin": _spin,
    "c_sleep": lambda record, rest: ctypes.PyDLL(None).sleep(300),  # PyDLL holds the interpreter lock
    "regex": lambda record, rest: float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))),
    "none": lambda record, rest: None,
    "text": lambda record, rest: "0.5",
    "nan": lambda record, rest: float("nan"),
    "huge": lambda record, rest: 1e300,
    "true": lambda record, rest: True,
    "parts": lambda record, rest: RewardResult(0.75, parts=(("format", 0.25), ("answer", 0.5))),
    "bad_part": lambda record, rest: RewardResult(0.75, parts=(("format", float("inf")),)),
    "own_error": lambda record, rest: RewardResult(0.0, error="no verdict"),
    "die": lambda record, rest: os._exit(7),
    "segfault": lambda record, rest: ctypes.string_at(0),
    "stop": lambda record, rest: os.kill(os.getpid(), signal.SIGSTOP),
    "close": lambda record, rest: os.closerange(3, 100) or time.sleep(300),
    "child": _child,
    "torch": lambda record, rest: "torch" in sys.modules,
    "pid": lambda record, rest: os.getpid(),
    "answer": lambda record, rest: float(record.answer == rest and record.entry == {"k": [1, 2]}),
}
