"""The first start of a run's engines, in which one may be lost as in any later one."""

from collections.abc import Callable

from rlhf.errors import EngineLostError
from rlhf.rollout.engine import RolloutEngine
from rlhf.trainers.recovery import Losses


class EngineStart:
    """This rank's part in it.

    Collective over the ranks of one engine alone, so that engines start at the same time, and while ranks without one
    load models.
    """

    def __init__(self, make: Callable[[], RolloutEngine] | None, *, survives_loss: bool) -> None:
        """Start the engine; what of it is lost meanwhile is left to `settled`.

        Args:
            make: Starts this rank's engine, on all its ranks; None outside the rollout pool.
            survives_loss: `rollout.on_loss` is replace; else a loss is raised, on all ranks of the engine.
        """
        self._make, self._survives_loss = make, survives_loss
        self._engine: RolloutEngine | None = None
        self._lost = self._try()

    def settled(self, losses: Losses) -> RolloutEngine | None:
        """This rank's engine, once none of the job's is lost; None outside the pool. Collective over the losses' group.

        Raises:
            EngineLostError: More losses than `rollout.max_losses`; on all ranks of the group.
        """
        losses.replace(self._lost, self._try)
        return self._engine

    def _try(self) -> str:
        if self._make is None:
            return ""
        try:
            self._engine = self._make()
        except EngineLostError as error:
            if not self._survives_loss:
                raise
            return str(error)
        return ""
