"""Process groups of one Megatron model over its pool, in Megatron's own collection. Knows no model.

Nothing here reads or writes megatron's global parallel state; any number of models with different layouts can live on
the same ranks. Groups over the same ranks are made once in a job, so two models of one layout share them.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from rlhf.config.parallel import ParallelConfig
from rlhf.dist.grid import Grid
from rlhf.dist.groups import GroupFactory

AXES = ("tp", "pp", "dp")
"""Axes of a model's grid, fastest first: tensor-parallel peers are neighbours."""


def model_grid(parallel: ParallelConfig) -> Grid:
    """Grid of a model's pool."""
    return Grid(AXES, (parallel.tp, parallel.pp, parallel.dp), parallel.first_rank)


def expert_grid(parallel: ParallelConfig) -> Grid:
    """How the ranks of one pipeline stage share its experts: a grid of their positions in the stage.

    Position of a rank: `tp_rank + tp * dp_rank`. Ranks that differ in edp only hold the same experts' same shards.
    """
    replicas = parallel.tp * parallel.dp // (parallel.ep * parallel.etp)
    return Grid(("etp", "ep", "edp"), (parallel.etp, parallel.ep, replicas))


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """A rank's groups in one model. Outside the pool every group is None and `is_member` is False."""

    grid: Grid
    rank: int
    collection: ProcessGroupCollection | None
    """Groups on the training device, as Megatron wants them."""
    cpu: ProcessGroup | None
    """All ranks of the pool, gloo: decisions and rows."""
    cpu_tp: ProcessGroup | None
    """Ranks that differ in tp only, gloo; the next two likewise."""
    cpu_pp: ProcessGroup | None
    cpu_dp: ProcessGroup | None
    pp_gradients: ProcessGroup | None = None
    """Ranks that differ in pp only, on the training device, a second time: gradients between the stages of a model with
    several chunks a stage, whose activations go over `collection.pp`. None without chunks."""

    @property
    def is_member(self) -> bool:
        """Whether this rank holds a part of the model."""
        return self.rank in self.grid.ranks

    @property
    def tp_rank(self) -> int:
        """Coordinate along tp. Members only, like all below."""
        return self.grid.coords(self.rank)["tp"]

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.grid.coords(self.rank)["pp"]

    @property
    def dp_rank(self) -> int:
        """Replica."""
        return self.grid.coords(self.rank)["dp"]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and sees the loss."""
        return self.pp_rank == self.grid.size("pp") - 1


def _embedding_sets(grid: Grid) -> list[tuple[int, ...]]:
    """First and last stage of each pipeline; every stage between is alone, for upstream asks the global about None."""
    sets = []
    for stages in grid.groups("pp"):
        sets.append(tuple(sorted({stages[0], stages[-1]})))
        sets.extend((rank,) for rank in stages[1:-1])
    return sets


def _expert_sets(parallel: ParallelConfig, *axes: str, all_stages: bool = False) -> list[tuple[int, ...]]:
    """Ranks of a stage that differ in the named axes of the expert grid only; or of all stages, taken together."""
    stages = model_grid(parallel).groups("tp", "dp")
    positions = expert_grid(parallel).groups(*axes)
    if all_stages:
        return [tuple(sorted(stage[at] for stage in stages for at in together)) for together in positions]
    return [tuple(stage[at] for at in together) for stage in stages for together in positions]


def _collection(parallel: ParallelConfig, factory: GroupFactory, *, is_member: bool) -> ProcessGroupCollection | None:
    grid = model_grid(parallel)
    alone = factory.device_group(grid.groups())
    tp, pp, dp = (factory.device_group(grid.groups(axis)) for axis in AXES)
    tp_pp = factory.device_group(grid.groups("tp", "pp"))
    tp_dp = factory.device_group(grid.groups("tp", "dp"))
    embedding = factory.device_group(_embedding_sets(grid))
    pool = factory.device_group(grid.groups(*AXES))
    ep, expt_tp, expt_dp = (factory.device_group(_expert_sets(parallel, axis)) for axis in ("ep", "etp", "edp"))
    tp_ep = factory.device_group(_expert_sets(parallel, "etp", "ep"))
    tp_ep_pp = factory.device_group(_expert_sets(parallel, "etp", "ep", all_stages=True))
    if not is_member:
        return None
    return ProcessGroupCollection(
        tp=tp,
        pp=pp,
        dp=dp,
        mp=tp_pp,
        cp=alone,
        tp_cp=tp,
        dp_cp=dp,
        intra_dp_cp=dp,
        tp_dp_cp=tp_dp,
        embd=embedding,
        pos_embd=alone,
        ep=ep,
        expt_tp=expt_tp,
        tp_ep=tp_ep,
        tp_ep_pp=tp_ep_pp,
        expt_dp=expt_dp,
        intra_expt_dp=expt_dp,
        inter_dist_opt=None,
        intra_dist_opt=pool,
    )


def make_groups(parallel: ParallelConfig, factory: GroupFactory) -> ModelGroups:
    """Groups of a model with a layout. Collective over the whole job, members or not."""
    grid, rank = model_grid(parallel), dist.get_rank()
    return ModelGroups(
        grid=grid,
        rank=rank,
        collection=_collection(parallel, factory, is_member=rank in grid.ranks),
        cpu=factory.cpu_group(grid.groups(*AXES)),
        cpu_tp=factory.cpu_group(grid.groups("tp")),
        cpu_pp=factory.cpu_group(grid.groups("pp")),
        cpu_dp=factory.cpu_group(grid.groups("dp")),
        pp_gradients=factory.device_group(grid.groups("pp"), purpose="gradients") if parallel.vpp > 1 else None,
    )
