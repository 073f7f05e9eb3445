"""What a step goes through: rollout, then training. Whatever a phase needs on the device is there while it lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf.metrics.timers import Timers
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.recovery import Recovery


@dataclass(slots=True)
class Phases:
    """Times the phases, and puts to sleep what they used. A phase's weight sync wakes its engine (`PolicySync`)."""

    timers: Timers
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""
    recovery: Recovery
    """Of this rank's engine, which may be lost by the time it goes to sleep."""
    sleep: str = "kv"
    """See `rollout.sleep`."""
    forget: Callable[[], None] = lambda: None
    """Called when the engine's weights were given back: the next sync must bring all."""
    freed_bytes: int = 0
    """What this rank's engine gave back when it last went to sleep."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """The engine works; afterwards training has its memory."""
        with self.timers.phase("rollout"):
            yield
            self._sleep()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """As rollout; its time is not the rollout's."""
        with self.timers.phase("evaluate"):
            yield
            self._sleep()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Models score and learn."""
        with self.timers.phase("training"):
            yield

    def _sleep(self) -> None:
        if self.engine is None or self.sleep == "none":
            return
        engine, weights = self.engine, self.sleep == "all"
        self.freed_bytes = self.recovery.guard(lambda: engine.sleep(weights=weights)) or 0
        if weights:
            self.forget()
