"""One model as Megatron holds it in two layouts on the same ranks: our sync between them, and Megatron-Core's own.

Both fill the same parameters from the same parameters. Megatron-Core plans at the first call and keeps the plan.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService, RecvOp, SendOp
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.config.sync import SyncConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.params import local_params
from rlhf.reshard.topology import Topology
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync

OURS, MEGATRON = "weight sync", "megatron.core.resharding"


class MegatronPair:
    """The two models of this rank. Collective over the job, whose ranks are the pool of both layouts."""

    def __init__(
        self, spec: ModelSpec, src: ParallelConfig, dst: ParallelConfig, factory: GroupFactory, everyone: ProcessGroup
    ) -> None:
        self._models = [_model(spec, parallel, factory) for parallel in (src, dst)]
        self.source, self.landed = (local_params(model) for model in self._models)
        layouts = [megatron_layout(spec, parallel, head=Head.LM, dtype="float32") for parallel in (src, dst)]
        self.source_layout = layouts[0]
        self._sync = WeightSync(
            *layouts,
            topology=Topology.blocks(src.num_ranks, ranks_per_node=src.num_ranks),
            group=everyone,
            bucket_bytes=SyncConfig().bucket_bytes,
            verify=Verify.NONE,
        )
        self._service = _HostCopyService()

    def ways(self) -> Mapping[str, Callable[[], object]]:
        """By name; ours first. Collective."""
        return {OURS: self._ours, MEGATRON: self._theirs}

    def _ours(self) -> None:
        self._sync.update_weights(self.source, self.landed)

    def _theirs(self) -> None:
        source, landed = self._models
        swap_model_weights(source.module, landed.module, self._service)


class _HostCopyService(GlooCopyService):
    """Megatron-Core's service for gloo without its CUDA stream, which a machine without CUDA cannot make."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gloo_pg = dist.new_group(backend="gloo")
        self.send_ops: list[SendOp] = []
        self.recv_ops: list[tuple[RecvOp, Tensor]] = []
        self._copy_stream = None


def _model(spec: ModelSpec, parallel: ParallelConfig, factory: GroupFactory) -> MegatronModel:
    model = build_model(
        spec,
        ModelConfig(path="none", init="random"),
        parallel,
        make_groups(parallel, factory),
        head=Head.LM,
        device=torch.device("cpu"),
        seed=1,
        trainable=False,
    )
    params: Mapping[str, Tensor] = local_params(model)
    for tensor in params.values():  # uninitialised memory until now
        tensor.zero_()
    return model
