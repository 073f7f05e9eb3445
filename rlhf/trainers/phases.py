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
        with self.timers.phase("rollout"), self._awake():
            yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """As rollout; its time is not the rollout's."""
        with self.timers.phase("evaluate"), self._awake():
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Models score and learn."""
        with self.timers.phase("training"):
            yield

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if self.engine is not None:
            self.engine.wake()
        yield
        if self.engine is not None:
            self.engine.sleep()
