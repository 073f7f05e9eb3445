"""What a step goes through: rollout, then training. Whatever a phase needs on the device is there while it lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhf.metrics.timers import Timers
from rlhf.rollout.engine import RolloutEngine


@dataclass(frozen=True, slots=True)
class Phases:
    """Times the phases and wakes and puts to sleep what they use."""

    timers: Timers
    engine: RolloutEngine | None
    """None on ranks outside the rollout pool."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """The engine is awake; it sleeps again afterwards, so that training has its memory."""
        with self.timers.phase("rollout"):
            if self.engine is not None:
                self.engine.wake()
            yield
            if self.engine is not None:
                self.engine.sleep()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Models score and learn."""
        with self.timers.phase("training"):
            yield
