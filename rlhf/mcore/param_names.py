"""Names of parameters in the modules of either layer spec, and in a layout. Pure.

A layout goes by the local spec's names and numbers a stage's layers through all its chunks; a module numbers its own.
"""

import re

LAYER_NUMBER = re.compile(r"^(decoder\.layers\.)(\d+)\.")

_TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's name, where it fuses a norm into the linear layer after it -> the local spec's."""

_TE_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
"""Transformer Engine's name of an expert's weight: one module holds the local experts, a parameter each."""

_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def local_name(name: str, before: int) -> str:
    """Name of a parameter in a layout, from that in the module of either layer spec.

    `before` layers of the stage are in earlier chunks.
    """
    for te_name, spec_name in _TE_NAMES.items():
        if name.endswith(te_name):
            name = name.removesuffix(te_name) + spec_name
    name = _TE_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", name)
    return LAYER_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + before}.", name)


def module_name(name: str, before: int, *, use_te: bool, has_experts: bool) -> str:
    """Name of a parameter in its module, from that in a layout: undoes `local_name`.

    Args:
        name: In the layout.
        before: Layers of the stage in earlier chunks.
        use_te: The module's layers are Transformer Engine's, its experts in one grouped module.
        has_experts: The model has experts; the norm before a router is fused into nothing.
    """
    name = LAYER_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) - before}.", name)
    if not use_te:
        return name
    for te_name, spec_name in _TE_NAMES.items():
        if name.endswith(f".{spec_name}") and not (has_experts and te_name.startswith("mlp.")):
            name = name.removesuffix(spec_name) + te_name
    return _LOCAL_EXPERT.sub(r"mlp.experts.\2.weight\1", name)
