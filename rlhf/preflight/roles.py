"""The roles of a run as the checks of a whole job see them: model, head and grid of each."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.config.model import TrainedRoleConfig
from rlhf.config.run import PPORunConfig, RunConfig
from rlhf.dist.grid import Grid
from rlhf.families.frozen import frozen_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import model_grid
from rlhf.preflight.inputs import Role, roles_of
from rlhf.rollout.placement import engine_grid


@dataclass(frozen=True, slots=True)
class ModelRole:
    """A Megatron model in its role."""

    name: str
    config: Role
    spec: ModelSpec
    head: Head

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients and an optimizer."""
        return isinstance(self.config, TrainedRoleConfig)

    @property
    def frozen(self) -> frozenset[str]:
        """Logical names of its weights that training leaves alone, apart from models that are not trained at all."""
        patterns = self.config.freeze if isinstance(self.config, TrainedRoleConfig) else ()
        return frozen_tensors(self.spec, patterns, head=self.head, where=f"{self.name}.freeze")

    @property
    def grid(self) -> Grid:
        """Its ranks."""
        return model_grid(self.config.parallel)


def model_roles(config: RunConfig, specs: Mapping[str, ModelSpec]) -> list[ModelRole]:
    """The roles whose model is known."""
    return [
        ModelRole(name, role, specs[name], Head.VALUE if name == "critic" else Head.LM)
        for name, role in roles_of(config).items()
        if name in specs
    ]


def cuts_of(config: RunConfig) -> dict[str, str]:
    """How each Megatron model cuts its layers and experts over the ranks of its grid, where it does."""
    return {
        name: " ".join(f"{axis}{size}" for axis in ("vpp", "ep", "etp") if (size := getattr(role.parallel, axis)) > 1)
        for name, role in roles_of(config).items()
    }


def grids_of(config: RunConfig) -> dict[str, Grid]:
    """Ranks of every role, the engines' too. Sizes must be sound."""
    grids = {name: model_grid(role.parallel) for name, role in roles_of(config).items()}
    if isinstance(config, PPORunConfig):
        rollout = config.rollout
        grids["rollout"] = engine_grid(
            tp=rollout.tp, dp=rollout.dp, first_rank=rollout.first_rank, stride=rollout.stride
        )
    return grids
