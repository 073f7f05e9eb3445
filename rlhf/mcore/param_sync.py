"""Parameters that an optimizer step left for the next forward pass to gather (`optim.overlap_param_gather`).

After such a step each dp rank holds its share of the new weights and the old ones of the others. Megatron gathers the
rest just before a module runs, by hooks on the modules. Whoever reads a parameter in another way asks here first.
"""

from collections.abc import Iterable

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


def gather_stale(chunks: Iterable[nn.Module]) -> None:
    """Bring all parameters of a rank's model chunks up to date; nothing is sent where they are.

    Collective over the model's dp axis; in step with its other passes, so that dp peers find the same parameters stale.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.overlap_param_gather:
            continue
        for bucket in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not bucket.param_gather_dispatched or bucket.param_gather_handle is not None:
                bucket.start_param_sync(force_sync=True)


def gather_before_use(chunk: nn.Module, param: Tensor) -> None:
    """What Megatron's hook does before a module runs, for a parameter whose module never runs (a head's weight).

    Without it such a parameter may still be on its way when the loss reads it. Collective over dp if it is stale.
    """
    if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.overlap_param_gather:
        return
    if param in chunk.param_to_bucket_group:  # a frozen one is in no bucket
        chunk.param_to_bucket_group[param].finish_param_sync()
