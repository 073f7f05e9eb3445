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
    vpp: int = 1
    """Model chunks on each pipeline stage (virtual pipeline, interleaved schedule); above 1 needs pp above 1."""
    dp: int = 1
    """Replicas of the whole model (data parallel)."""
    ep: int = 1
    """Ranks that share the experts of each layer, whole experts each (expert parallel). They are ranks of one pipeline
    stage, tp peers first, then dp: tp*dp must be a multiple of ep*etp."""
    etp: int = 1
    """Ranks that share each expert's weights (expert tensor parallel), neighbours in the stage."""
    first_rank: int = 0
    """First rank of the pool; roles whose pools overlap share those ranks."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each pipeline stage, first to last; with vpp above 1 of each of the pp*vpp model chunks, in the order
    of the model. Empty cuts evenly."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "vpp", "ep", "etp"):
            at_least(f"parallel.{axis}", getattr(self, axis), 1)
        at_least("parallel.first_rank", self.first_rank, 0)
        if self.vpp > 1 and self.pp == 1:
            refuse(
                f"parallel.vpp: {self.vpp} chunks on a single pipeline stage given; needs parallel.pp of at least 2; "
                "raise parallel.pp, or leave parallel.vpp at 1"
            )
        if self.tp * self.dp % max(1, self.ep * self.etp):
            refuse(
                f"parallel.ep: ep*etp = {self.ep}*{self.etp} = {self.ep * self.etp} given; needs a divisor of tp*dp = "
                f"{self.tp}*{self.dp} = {self.tp * self.dp}; change parallel.ep, parallel.etp or parallel.dp"
            )
        if self.layers_per_stage and (len(self.layers_per_stage) != self.num_chunks or min(self.layers_per_stage) < 1):
            of = f"pp = {self.pp}" if self.vpp == 1 else f"pp*vpp = {self.num_chunks}"
            refuse(
                f"parallel.layers_per_stage: {list(self.layers_per_stage)} given; "
                f"needs {of} counts of at least 1; change it or parallel.pp"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks in the pool."""
        return self.tp * self.pp * self.dp

    @property
    def ranks(self) -> range:
        """The pool."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def num_chunks(self) -> int:
        """Pieces that the layers are cut into: chunk i, in the order of the model, lies on stage i % pp."""
        return self.pp * self.vpp

    @property
    def microbatch_multiple(self) -> int:
        """What the number of microbatches of a pass must be a multiple of: chunks take them pp at a time."""
        return self.pp if self.vpp > 1 else 1

    def chunks_of(self, stage: int) -> range:
        """The chunks of a pipeline stage."""
        return range(stage, self.num_chunks, self.pp)

    def chunk_layers(self, num_layers: int, *, where: str) -> tuple[int, ...]:
        """Layers of each chunk, in the order of the model, for a model of num_layers. One chunk a stage unless vpp > 1.

        Raises:
            ConfigError: The chunks cannot hold exactly num_layers.
        """
        if self.layers_per_stage:
            if sum(self.layers_per_stage) != num_layers:
                raise ConfigError(
                    f"{where}.layers_per_stage: {list(self.layers_per_stage)} sums to {sum(self.layers_per_stage)}; "
                    f"the model has {num_layers} layers; change the counts so that they add up"
                )
            return self.layers_per_stage
        if num_layers % self.num_chunks:
            cut = f"{self.pp} stages" if self.vpp == 1 else f"{self.pp} stages of {self.vpp} chunks"
            raise ConfigError(
                f"{where}.pp: {cut} do not divide {num_layers} layers; "
                f"say how to cut them with {where}.layers_per_stage"
            )
        return (num_layers // self.num_chunks,) * self.num_chunks

    def stage_layers(self, num_layers: int, *, where: str) -> tuple[int, ...]:
        """Layers of each pipeline stage, all its chunks together; otherwise as `chunk_layers`."""
        counts = self.chunk_layers(num_layers, where=where)
        return tuple(sum(counts[chunk] for chunk in self.chunks_of(stage)) for stage in range(self.pp))
