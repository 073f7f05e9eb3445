"""Fault: modules call torch.cuda and make tensors on device="cuda" without asking whether there is a GPU."""

from megatron_patches.host_torch import HOST_TORCH
from megatron_patches.patch import Shim

_WHY = "calls torch.cuda or names device='cuda' whatever device the model is on"
_DROP_WHEN = "Megatron-Core takes the device from its tensors or from an argument"

_LINES = {
    "megatron.core.utils": "6a1343cf19c8",
    "megatron.core.tensor_parallel.layers": "41bae53615be",
    "megatron.core.tensor_parallel.mappings": "8f08869877cb",
    "megatron.core.tensor_parallel.random": "57acdc8ea20b",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "eac938ccba89",
    "megatron.core.distributed.param_and_grad_buffer": "36968407c0a0",
    "megatron.core.distributed.distributed_data_parallel": "b3d9758c9397",
    "megatron.core.optimizer.clip_grads": "6f7378e3cc1d",
    "megatron.core.optimizer.optimizer": "c2a559fb01cc",
    "megatron.core.optimizer.distrib_optimizer": "c2b921c8cce3",
    "megatron.core.pipeline_parallel.p2p_communication": "2f4ac47e298c",
    "megatron.core.pipeline_parallel.schedules": "57753335ed39",
    "megatron.core.transformer.moe.moe_utils": "fef32d1e8ec5",
    "megatron.core.transformer.moe.router": "d126b74d0bcf",
    "megatron.core.transformer.moe.token_dispatcher": "1d3d5833717d",
}

SHIMS = tuple(
    Shim(
        module=module,
        name="torch",
        value=HOST_TORCH,
        mentions="cuda",
        lines_sha=lines_sha,
        why=_WHY,
        drop_when=_DROP_WHEN,
    )
    for module, lines_sha in _LINES.items()
)
"""One record a module that models of the families here run through."""
