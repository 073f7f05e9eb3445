"""The actor's weights into the rollout engines: one version after another."""

from collections.abc import Callable, Mapping

from torch import Tensor

from rlhf.reshard.weight_sync import ReshardStats, WeightSync
from rlhf.rollout.engine import RolloutEngine


class PolicySync:
    """Brings the engines to the actor's weights. Every rank of the job makes the same calls."""

    def __init__(
        self,
        sync: WeightSync | None,
        *,
        actor_params: Callable[[], Mapping[str, Tensor]],
        engine: RolloutEngine | None,
    ) -> None:
        """`sync`: None on ranks of neither pool. `actor_params`: this rank's weights, up to date; empty outside."""
        self._sync, self._actor_params, self._engine = sync, actor_params, engine

    def update_weights(self, *, policy_version: int) -> ReshardStats | None:
        """Move the weights; the engines then hold this version (updates of the actor so far).

        Collective over the pools of actor and engines; other ranks pass through.
        """
        if self._sync is None:
            return None
        stats = self._sync.update_weights(
            self._actor_params(), self._engine.params() if self._engine is not None else {}
        )
        if self._engine is not None:
            self._engine.weights_updated(policy_version)
        return stats
