"""Fault: the norm used without Transformer Engine or Apex refuses sequence parallelism."""

import torch
from megatron.core.transformer import TransformerConfig

from megatron_patches.patch import Patch


def _rms_norm(
    _cls: type,
    config: TransformerConfig,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """RMSNorm of torch; its weights are marked so that their gradients are summed over the tensor-parallel ranks."""
    assert config.normalization == "RMSNorm", f"only RMSNorm is built here, not {config.normalization}"
    assert not config.layernorm_zero_centered_gamma, "torch's RMSNorm has no zero-centered gamma"
    norm = torch.nn.RMSNorm(
        hidden_size, eps=eps, dtype=config.params_dtype, device=None if config.use_cpu_initialization else "cuda"
    )
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


PATCH = Patch(
    target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    source_sha="6cb54a06fa41",
    replacement=_rms_norm,
    why="asserts that sequence parallelism is off, and makes weights in fp32 whatever params_dtype says",
    drop_when="WrappedTorchNorm marks its weights sequence_parallel and follows params_dtype",
)
