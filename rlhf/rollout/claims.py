"""Who answers what, settled while engines run: units of work are claimed one at a time through counters of a store.

No process serves the queues. A claim is one atomic addition, whose result says which unit was got, so that each is got
once whatever the timing. Knows no engine and no rows.
"""

from collections.abc import Sequence

from torch.distributed import Store

from rlhf.rollout.routes import Queue, Unit

_TAIL = 1 << 32
"""A queue's counter is taken from the front + _TAIL * taken from the tail."""
_LOST = 1 << 40
"""Load of an engine that is lost: more than any engine has."""


class Claims:
    """One leader's hand on the queues of one call.

    Every leader of the pool makes one, with the same queues; before anyone claims, each has called `open`. Units are
    claimed from the front of one's own queue, then those that a lost engine gave back, then from the tail of the queue
    whose engine has most before it, as long as that evens out the loads.
    """

    def __init__(self, store: Store, queues: Sequence[Queue], *, mine: int) -> None:
        """`store`: keys here are this call's alone. `mine`: number of this leader's queue."""
        self._store, self._queues, self._mine = store, queues, mine
        self._empty: set[int] = set()
        self._seen_back: set[int] = set()
        self._load = 0
        self.from_others = 0
        """Units claimed here that were planned for other engines."""

    @staticmethod
    def open(store: Store, number: int) -> None:
        """Make the keys of one queue, so that they can be read; needs no plan."""
        for key in (f"queue/{number}", f"load/{number}", "finished", "back", "lost"):
            store.add(key, 0)

    def next(self) -> Unit | None:
        """What this engine is to answer next, and no other will; None: nothing now, though some may yet come back."""
        unit = self._claim(self._mine, front=True)
        if unit is None:
            unit = self._given_back() or self._from_the_busiest()
            self.from_others += unit is not None
        if unit is not None:
            self._add_load(unit.tokens)
        return unit

    def finish(self, tokens: int) -> int:
        """One group was answered, which was expected to take so many tokens. How many are, this one included."""
        self._add_load(-tokens)
        return self._store.add("finished", 1)

    def finished(self) -> int:
        """Groups answered so far, by all engines."""
        return self._store.add("finished", 0)

    def give_back(self, units: Sequence[Unit]) -> None:
        """This engine is lost: what it had and has not finished is for the others, as is its queue."""
        for unit in units:
            slot = self._store.add("back", 1) - 1
            self._store.set(f"back/{slot}", " ".join(map(str, (unit.tokens, *unit.groups))))
        self._store.add(f"load/{self._mine}", _LOST)
        self._store.add("lost", 1)

    def lost(self) -> int:
        """Engines that are lost."""
        return self._store.add("lost", 0)

    def delete(self) -> None:
        """Remove the keys. By one leader, once no other will call anything any more."""
        for slot in range(self._store.add("back", 0)):
            self._store.delete_key(f"back/{slot}")
            self._store.delete_key(f"back/{slot}/taken")
        for number in range(len(self._queues)):
            self._store.delete_key(f"queue/{number}")
            self._store.delete_key(f"load/{number}")
        for key in ("finished", "back", "lost"):
            self._store.delete_key(key)

    def _claim(self, number: int, *, front: bool) -> Unit | None:
        """The next unit of a queue; each of the first so many additions as it has units gets another one of them."""
        if number in self._empty:
            return None
        taken_back, taken_front = divmod(self._store.add(f"queue/{number}", 1 if front else _TAIL), _TAIL)
        if taken_front + taken_back > len(self._queues[number]):
            self._empty.add(number)
            return None
        return self._queues[number][taken_front - 1 if front else -taken_back]

    def _given_back(self) -> Unit | None:
        for slot in range(self._store.add("back", 0)):
            if slot in self._seen_back or not self._store.check([f"back/{slot}"]):
                continue
            self._seen_back.add(slot)
            if self._store.add(f"back/{slot}/taken", 1) == 1:
                tokens, *groups = map(int, self._store.get(f"back/{slot}").split())
                return Unit(tuple(groups), tokens)
        return None

    def _from_the_busiest(self) -> Unit | None:
        """From the tail of the queue whose engine has most before it; nothing where that would only turn the tables."""
        others = [n for n in range(len(self._queues)) if n != self._mine and n not in self._empty]
        if not others:
            return None
        read = self._store.multi_get([f"{key}/{n}" for key in ("queue", "load") for n in others])
        taken, loads = ([int(value) for value in part] for part in (read[: len(others)], read[len(others) :]))
        ahead = {}
        for number, counter, load in zip(others, taken, loads, strict=True):
            taken_back, taken_front = divmod(counter, _TAIL)
            waiting = self._queues[number][taken_front : len(self._queues[number]) - taken_back]
            if waiting:
                ahead[number] = load + sum(unit.tokens for unit in waiting), waiting[-1].tokens
            else:
                self._empty.add(number)
        if not ahead:
            return None
        number = max(ahead, key=lambda n: ahead[n][0])
        theirs, unit = ahead[number]
        if self._load and self._load + unit > theirs - unit:
            return None
        return self._claim(number, front=False)

    def _add_load(self, tokens: int) -> None:
        self._load += tokens
        self._store.add(f"load/{self._mine}", tokens)
