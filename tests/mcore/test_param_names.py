"""Names in a module of either layer spec against names in a layout."""

import pytest

from rlhf.mcore.param_names import local_name, module_name

DENSE = {
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.4.input_layernorm.weight",
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.3.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.linear_fc1.weight": "decoder.layers.4.mlp.linear_fc1.weight",
    "decoder.layers.0.self_attention.q_layernorm.weight": "decoder.layers.3.self_attention.q_layernorm.weight",
    "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
}
EXPERTS = {
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.4.input_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.3.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.router.weight": "decoder.layers.3.mlp.router.weight",
    "decoder.layers.0.mlp.experts.linear_fc2.weight11": (
        "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight"
    ),
}


@pytest.mark.parametrize(("names", "has_experts"), [(DENSE, False), (EXPERTS, True)])
def test_transformer_engines_names_go_by_the_local_specs_in_a_layout_and_back(names, has_experts) -> None:
    for te_name, name in names.items():
        assert local_name(te_name, 3) == name
        assert module_name(name, 3, use_te=True, has_experts=has_experts) == te_name
        local = module_name(name, 3, use_te=False, has_experts=has_experts)
        assert (local_name(local, 3), local.split(".")[3:]) == (name, name.split(".")[3:])
