"""What the device knows of the running rows: one column of integers per slot."""

from enum import IntEnum

import torch
from torch import Tensor

from rlhf.rollout.native.scheduler import Row


class Column(IntEnum):
    """Meaning of the integers of a slot."""

    TOKEN = 0
    """The row's last token, whose keys and values are not yet in the cache."""
    POSITION = 1
    """Its position in the sequence."""
    SEED = 2
    NUM_SAMPLED = 3
    """Tokens of the response so far."""


class RunningRows:
    """int64 [columns, slots] on the device; columns of unused slots are 0 or stale, but always valid numbers."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._state = torch.zeros(len(Column), num_slots, dtype=torch.int64, device=device)

    def get(self, column: Column, rows: int) -> Tensor:
        """Numbers of the first slots; a view."""
        return self._state[column, :rows]

    def enter(self, rows: list[Row], slots: list[int]) -> None:
        """Fill slots with rows that have sampled nothing beyond what they came with."""
        columns = [[(r.begun or r.prompt)[-1], len(r.prompt) + len(r.begun) - 1, r.seed, len(r.begun)] for r in rows]
        self._state[:, slots] = torch.tensor(columns, device=self._state.device).t()

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slots onto others."""
        self._state[:, target] = self._state[:, source]

    def advance(self, tokens: Tensor) -> None:
        """Every one of the first slots got its next token (int64 [rows])."""
        rows = tokens.numel()
        self._state[Column.TOKEN, :rows] = tokens
        self._state[Column.POSITION : Column.NUM_SAMPLED + 1 : 2, :rows] += 1
