"""The actor's weights into the rollout engines: one version after another."""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from rlhf.errors import EngineLostError
from rlhf.reshard.stats import ReshardStats
from rlhf.reshard.verify import Mismatch
from rlhf.reshard.weight_sync import WeightSync
from rlhf.rollout.engine import RolloutEngine


class PolicySync:
    """Brings the engines to the actor's weights. Every rank of the job makes the same calls."""

    def __init__(
        self,
        sync: WeightSync | None,
        *,
        actor_params: Callable[[], Mapping[str, Tensor]],
        engine: RolloutEngine | None,
        trained: Collection[str] | None = None,
        survives_loss: bool = False,
    ) -> None:
        """Keep the parts.

        Args:
            sync: None on ranks of neither pool.
            actor_params: This rank's weights, up to date; empty outside the actor's pool.
            engine: This rank's part of its engine; None outside the rollout pool.
            trained: Logical tensors that training may change, the same on every rank; None: all. Others are sent once.
            survives_loss: `rollout.on_loss` is replace.
        """
        self._sync, self._actor_params, self._engine, self._trained = sync, actor_params, engine, trained
        self._version: int | None = None
        self._survives_loss = survives_loss

    def update_weights(self, *, policy_version: int) -> ReshardStats | None:
        """Move the weights; the engines are then awake and hold this version (updates of the actor so far).

        An engine takes the memory of its weights before the transfer, that of keys and values after it.

        What cannot have changed since the last call is not sent: all of it when the version is the same. Collective
        over the pools of actor and engines; other ranks pass through.
        """
        if self._sync is None:
            return None
        self._wake_weights()
        stats = self._sync.update_weights(
            self._actor_params(),
            self._engine.params() if self._engine is not None else {},
            changed=() if policy_version == self._version else self._trained,
        )
        self._version = policy_version
        if self._engine is not None:
            self._engine.weights_updated(policy_version)
            self._engine.wake()
        return stats

    def _wake_weights(self) -> None:
        """Where losses are survived, a lost engine takes part in the transfer all the same; all raise at its end."""
        if self._engine is None:
            return
        try:
            self._engine.wake_weights()
        except EngineLostError:
            if not self._survives_loss:
                raise

    @property
    def num_tensors(self) -> int:
        """Logical tensors of the model; 0 on ranks of neither pool."""
        return 0 if self._sync is None else self._sync.num_tensors

    def compare(self) -> tuple[Mismatch, ...] | None:
        """Blocks of the engines' weights that differ from the actor's as they are now; nothing is moved.

        None where the engines hold no weights that could be compared, and on ranks of neither pool. Collective as
        `update_weights`.
        """
        if self._sync is None:
            return None
        found = self._sync.compare(self._actor_params(), self._engine.params() if self._engine is not None else {})
        if found is not None and self._engine is not None and self._version is not None:
            self._engine.weights_updated(self._version)  # ends what an engine behind a sink takes for an update
        return found

    def forget(self) -> None:
        """This rank's engine may have lost its weights (restart, release of memory): all are sent the next time.

        Local; one rank of the engine is enough.
        """
        if self._sync is not None:
            self._sync.forget()
