"""How long the slots of the cache are, and how many: pure bookkeeping, the same on every rank of an engine."""

from collections import deque
from dataclasses import dataclass
from math import ceil

from rlhf.rollout.native.memory import SPAN_STEP
from rlhf.rollout.native.scheduler import Row, Scheduler


@dataclass(frozen=True, slots=True)
class Cut:
    """The cache in equal slots."""

    num_slots: int
    slot_tokens: int


class SlotPlan:
    """Decides when the cache is cut anew for the rows of a scheduler, and lets no row enter that has no room.

    Slots are as long as the longest row that came may get. A longer row waits, and what is behind it, until no more
    rows run than there can be longer slots; what runs moves with its keys and values. Slots that are twice as long as
    any row here needs are cut shorter when that lets more rows run.
    """

    def __init__(self, scheduler: Scheduler, *, max_running: int, cache_tokens: int, max_new_tokens: int) -> None:
        self._scheduler, self._max_running, self._max_new_tokens = scheduler, max_running, max_new_tokens
        self._cache_tokens, self._now = cache_tokens, Cut(0, 0)
        self._num_added = 0
        self._longest = deque[tuple[int, int]]()  # of the rows that wait, (which, tokens): each longer than all behind

    @property
    def room(self) -> int:
        """How many rows could begin beside those that run, and one more where the slots are fewer than rows may run.

        That one waits, so that shorter slots are made when they would do.
        """
        return self._scheduler.num_open + (self._now.num_slots < self._max_running)

    def add(self, rows: list[Row]) -> None:
        """Let rows wait."""
        for row in rows:
            tokens = self._row_tokens(row)
            while self._longest and self._longest[-1][1] <= tokens:
                self._longest.pop()
            self._longest.append((self._num_added, tokens))
            self._num_added += 1
        self._scheduler.add(rows)

    def next_cut(self) -> Cut | None:
        """Another cut to be made before rows enter; None: as it is. Sets how many rows may run."""
        scheduler, now = self._scheduler, self._now
        scheduler.num_slots = now.num_slots
        if not scheduler.num_waiting:
            return None
        while self._longest[0][0] < self._num_added - scheduler.num_waiting:  # it has entered
            self._longest.popleft()
        running, longest = scheduler.running(), self._longest[0][1]
        if longest > now.slot_tokens:
            wanted = self._cut(longest)
            if wanted.num_slots < len(running):
                scheduler.num_slots = 0
                return None
        elif now.num_slots < self._max_running and scheduler.num_waiting > scheduler.num_open:
            wanted = self._cut(max(longest, *(self._row_tokens(row) for row in running), 0))
            if 2 * wanted.slot_tokens > now.slot_tokens:
                return None
        else:
            return None
        self._now = wanted
        scheduler.num_slots = wanted.num_slots
        return wanted

    def _row_tokens(self, row: Row) -> int:
        """Tokens of a row whose keys and values are held, at most: all but the last."""
        return len(row.prompt) + self._max_new_tokens - 1

    def _cut(self, row_tokens: int) -> Cut:
        slot_tokens = ceil(row_tokens / SPAN_STEP) * SPAN_STEP
        return Cut(min(self._max_running, self._cache_tokens // slot_tokens), slot_tokens)
