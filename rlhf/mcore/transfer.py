"""The weights of one Megatron model moved into another's parameters, whatever the two layouts and pools.

To start a model from another's weights in memory, without reading the checkpoint again.
"""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from rlhf.config.parallel import ParallelConfig
from rlhf.families.inherit import inherited_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import draw_rest
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.params import current_params, local_params
from rlhf.reshard.check import Certificate
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A Megatron model in its layout, as every rank knows it."""

    name: str
    """What messages call it."""
    spec: ModelSpec
    parallel: ParallelConfig
    head: Head
    dtype: str


def transfer_layouts(src: Placed, dst: Placed) -> tuple[ModelLayout, ModelLayout]:
    """(source, destination), heads that only one of them has left out. Pure.

    Raises:
        LayoutError: They are not one model, heads apart, or a layout cannot hold it.
    """
    shared = inherited_tensors(
        src.spec, dst.spec, src_head=src.head, dst_head=dst.head, where=f"{dst.name}.model.init", source=src.name
    )
    source, destination = (
        megatron_layout(one.spec, one.parallel, head=one.head, dtype=one.dtype).only(shared) for one in (src, dst)
    )
    return source, destination


def transfer_weights(
    layouts: tuple[ModelLayout, ModelLayout],
    src: MegatronModel | None,
    dst: MegatronModel | None,
    *,
    topology: Topology,
    group: ProcessGroup,
    device: torch.device,
    bucket_bytes: int,
) -> Certificate:
    """Fill a new model's weights from another's, once. Collective over `group`: the ranks of both pools.

    A value head that the source lacks is drawn from the model's seed. Make the optimizer afterwards.

    Args:
        layouts: From `transfer_layouts`.
        src: This rank's part of the source; None outside its pool.
        dst: This rank's part of the destination, its weights not yet set; None outside its pool.
        topology: Nodes of the job's ranks.
        group: Its transport works on `device`.
        device: Where the models live.
        bucket_bytes: Most bytes packed for one transfer.

    Raises:
        LayoutError, WeightSyncError: As `WeightSync`: among others, checksums of both sides differ afterwards.
    """
    sync = WeightSync(*layouts, topology=topology, group=group, device=device, bucket_bytes=bucket_bytes)
    if dst is not None:
        draw_rest(dst, given=frozenset(layouts[1].tensors))
    sync.update_weights(current_params(src) if src else {}, local_params(dst) if dst else {})
    assert sync.certificate is not None, "ranks of the group are in a pool"
    return sync.certificate
