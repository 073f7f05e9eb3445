"""Continuous batching: which sequence runs in which slot. Pure bookkeeping; knows no tensor and no model.

All ranks of an engine run the same scheduler on the same inputs, so they agree without a word.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Row:
    """One response to be sampled."""

    index: int
    """Number in the run."""
    prompt: tuple[int, ...]
    seed: int
    begun: tuple[int, ...] = ()
    """Tokens of its response that it came with."""
    entered: int = 0
    """Step at which it began to run."""
    cached_tokens: int = 0
    """Of its prompt, that were not computed for it."""

    def num_tokens(self, step: int) -> int:
        """Of prompt and response, while it runs, once so many steps were made."""
        return len(self.prompt) + self.num_sampled(step)

    def num_sampled(self, step: int) -> int:
        """Of the response alone."""
        return len(self.begun) + step - self.entered


@dataclass(slots=True)
class Admission:
    """Rows that enter at once, and where the keys and values of their prompts come from."""

    rows: list[Row] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """One for each row."""
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Distinct prompts that must be computed."""
    computed: list[tuple[int, int]] = field(default_factory=list)
    """(index into prompts, slot)."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """(slot of a running row with the same prompt, slot)."""


class Scheduler:
    """Rows in the order given; at most num_slots run at a time, in slots 0..num_running-1."""

    def __init__(self, rows: Iterable[Row] = (), *, num_slots: int) -> None:
        self._waiting = deque(rows)
        self.num_slots = num_slots
        """May be changed; rows beyond it go on running, and none enters."""
        self._slots: list[Row | None] = []

    def add(self, rows: Iterable[Row]) -> None:
        """More rows, behind those that wait."""
        self._waiting.extend(rows)

    @property
    def num_running(self) -> int:
        """Slots in use, from 0 on."""
        return len(self._slots)

    @property
    def is_done(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting and all(row is None for row in self._slots)

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Rows that could enter."""
        return max(0, self.num_slots - sum(row is not None for row in self._slots))

    def running(self) -> list[Row]:
        """The running rows in slot order."""
        return [row for row in self._slots if row is not None]

    def occupied(self) -> list[tuple[int, Row]]:
        """The running rows, each with its slot."""
        return [(slot, row) for slot, row in enumerate(self._slots) if row is not None]

    def finish(self, slots: Iterable[int]) -> list[Row]:
        """Take rows out; their slots stay open until `admit` and `close_gaps`."""
        found = []
        for slot in slots:
            row = self._slots[slot]
            assert row is not None, f"slot {slot} is empty"
            found.append(row)
            self._slots[slot] = None
        return found

    def admit(self) -> Admission:
        """Let waiting rows into open slots.

        A prompt that a running row has is copied from it; one that several new rows share is computed once.
        """
        found = Admission()
        holders = {row.prompt: slot for slot, row in enumerate(self._slots) if row is not None} if self._waiting else {}
        computed: dict[tuple[int, ...], int] = {}
        open_slots = deque(slot for slot, row in enumerate(self._slots) if row is None)
        for _ in range(min(len(self._waiting), self.num_open)):
            row = self._waiting.popleft()
            if not open_slots:
                open_slots.append(len(self._slots))
                self._slots.append(None)
            slot = open_slots.popleft()
            self._slots[slot] = row
            found.rows.append(row)
            found.slots.append(slot)
            if row.prompt in holders or row.prompt in computed:
                row.cached_tokens = len(row.prompt) - 1
            if row.prompt in holders:
                found.copied.append((holders[row.prompt], slot))
            else:
                index = computed.setdefault(row.prompt, len(computed))
                found.computed.append((index, slot))
        found.prompts = list(computed)
        return found

    def close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows into open slots, so that slots 0..num_running-1 are all in use: (from, to) of each."""
        moves = []
        while None in self._slots:
            last = self._slots.pop()
            if last is not None:
                gap = self._slots.index(None)
                self._slots[gap] = last
                moves.append((len(self._slots), gap))
        return moves
