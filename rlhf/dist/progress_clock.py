"""What this rank is doing, and since when. The watchdog reads it; loops set it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ProgressClock:
    """Set by `tick` in every long loop; cheap enough for each decoded token."""

    def __init__(self) -> None:
        self._state = ("start", time.monotonic())
        self._ticks = 0
        self._waiting = 0
        self.changed = threading.Event()
        """Set when a tick names another phase; who reads it clears it."""

    def tick(self, what: str) -> None:
        """Progress was made, in the phase `what` (such as "rollout")."""
        if what != self._state[0]:
            self.changed.set()
        self._state = (what, time.monotonic())
        self._ticks += 1

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which the whole process stood still (stopped, or its machine asleep)."""
        what, since = self._state
        self._state = (what, since + seconds)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for others and is not blamed for standing still as long as one of them moves.

        Ranks inside a call of torch.distributed are known to wait without this; it is for other kinds of waiting.
        """
        self.tick(what)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self.tick(what)

    @property
    def what(self) -> str:
        """The phase of the last tick."""
        return self._state[0]

    @property
    def ticks(self) -> int:
        """Ticks so far."""
        return self._ticks

    @property
    def idle_s(self) -> float:
        """Seconds since the last tick."""
        return time.monotonic() - self._state[1]

    @property
    def declared_waiting(self) -> bool:
        """Inside `waiting`."""
        return self._waiting > 0
