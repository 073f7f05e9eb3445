"""Which Megatron modules a layer is built of, and getting Megatron ready for the device it will run on."""

from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_patches.registry import apply, choose, runs_on_host


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers on a device are Transformer Engine's."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def prepare_megatron(device: torch.device) -> None:
    """Put the patches in place that models on a device need; a second call changes nothing.

    Raises:
        PatchError: Megatron-Core is not the one that a patch was written for.
    """
    on_host = device.type != "cuda"
    assert on_host or not runs_on_host(), "a process that has built a model on the CPU cannot build one on a GPU"
    apply(choose(has_cuda=not on_host, has_te=uses_transformer_engine(device)))


def make_layer_spec(*, qk_norm: bool, use_te: bool, num_experts: int = 0) -> ModuleSpec:
    """Megatron's spec of one decoder layer. Call `prepare_megatron` first.

    Experts are Transformer Engine's grouped products, or one MLP after the other without it.
    """
    experts = num_experts or None
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=qk_norm
        )
    return get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=qk_norm)
