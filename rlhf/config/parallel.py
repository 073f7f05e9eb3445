"""How many ranks each parallel axis of a role gets, and where its pool of ranks begins."""

from dataclasses import dataclass

from rlhf.config.checks import at_least, refuse
from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Layout of one Megatron model over its pool: `tp*pp*dp` consecutive ranks from `first_rank` on.

    Sequence parallelism is on whenever tp > 1.
    """

    tp: int = 1
    """Ranks that share each layer's weights (tensor parallel)."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas of the whole model (data parallel)."""
    first_rank: int = 0
    """First rank of the pool; roles whose pools overlap share those ranks."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each pipeline stage, first to last; empty cuts evenly."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp"):
            at_least(f"parallel.{axis}", getattr(self, axis), 1)
        at_least("parallel.first_rank", self.first_rank, 0)
        if self.layers_per_stage and (len(self.layers_per_stage) != self.pp or min(self.layers_per_stage) < 1):
            refuse(
                f"parallel.layers_per_stage: {list(self.layers_per_stage)} given; "
                f"needs pp = {self.pp} counts of at least 1; change it or parallel.pp"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks in the pool."""
        return self.tp * self.pp * self.dp

    @property
    def ranks(self) -> range:
        """The pool."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def stage_layers(self, num_layers: int, *, where: str) -> tuple[int, ...]:
        """Layers of each stage for a model of num_layers.

        Raises:
            ConfigError: The stages cannot hold exactly num_layers.
        """
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != num_layers:
                raise ConfigError(
                    f"{where}.layers_per_stage: {list(self.layers_per_stage)} sums to {sum(self.layers_per_stage)}; "
                    f"the model has {num_layers} layers; change the counts so that they add up"
                )
            return self.layers_per_stage
        if num_layers % self.pp:
            raise ConfigError(
                f"{where}.pp: {self.pp} stages do not divide {num_layers} layers; "
                f"say how to cut them with {where}.layers_per_stage"
            )
        return (num_layers // self.pp,) * self.pp
