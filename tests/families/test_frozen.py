"""Patterns against the names of weights."""

import re
from dataclasses import replace

import pytest

from rlhf.errors import ConfigError
from rlhf.families.frozen import changing_tensors, frozen_tensors
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec

SPEC = ModelSpec(
    family="qwen2",
    vocab_size=53,
    hidden_size=24,
    ffn_size=28,
    num_layers=12,
    num_heads=8,
    num_kv_heads=2,
    head_dim=10,
    norm_eps=1e-6,
    rope_theta=500.0,
    rope_scaling=None,
    max_positions=128,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
)


def test_patterns_name_what_stays_and_the_rest_can_change() -> None:
    frozen = frozen_tensors(SPEC, ["model.layers.1.*", "model.embed_tokens.weight"], head=Head.LM, where="x")
    names = {tensor.name for tensor in logical_tensors(SPEC, head=Head.LM)}
    of_layer = {tensor.name for tensor in logical_tensors(SPEC, head=Head.LM) if tensor.layer == 1}  # not 10 and 11
    assert frozen == {"model.embed_tokens.weight"} | of_layer
    changing = changing_tensors(SPEC, ["model.layers.1.*", "model.embed_tokens.weight"], head=Head.LM, where="x")
    assert changing == names - frozen
    assert changing_tensors(SPEC, [], head=Head.LM, where="x") == names
    assert "score.weight" in changing_tensors(SPEC, ["model.*"], head=Head.VALUE, where="x")


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (
            ["model.layers.99.*"],
            "'model.layers.99.*' matches none of the model's 146 weights; the nearest are model.layers",
        ),
        (["model.embed_token.weight"], "nearest are model.embed_tokens.weight"),
        (["model.layers.0"], "it begins the names of some; write model.layers.0.*"),
        (["lm_head.*"], "the lm head is the embedding; freeze model.embed_tokens.weight"),
        (["model.*"], "match all 146 weights"),
        (
            ["*.3.self_attn.q_proj.weight"],
            "model.layers.3.self_attn.q_proj.weight is frozen, model.layers.3.self_attn.k_proj.weight, "
            "model.layers.3.self_attn.v_proj.weight is not; Megatron holds them in one parameter",
        ),
        (
            ["*.3.mlp.up_proj.weight"],
            "model.layers.3.mlp.up_proj.weight is frozen, model.layers.3.mlp.gate_proj.weight is",
        ),
        (["*.[qkv]_proj.weight"], "model.layers.0.self_attn.q_proj.bias is not; Megatron trains no bias beside"),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_name(patterns: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^critic\.freeze: .*{re.escape(says)}"):
        frozen_tensors(SPEC, patterns, head=Head.LM, where="critic.freeze")


def test_experts_of_a_layer_stay_or_train_together() -> None:
    spec = replace(SPEC, family="mixtral", qkv_bias=False, num_experts=3, experts_per_token=2, moe_ffn_size=28)
    frozen = frozen_tensors(spec, ["*.1.*.w[13].weight", "*.block_sparse_moe.gate.weight"], head=Head.LM, where="x")
    assert len(frozen) == 2 * 3 + 12
    for patterns, stays, trains in (
        (["*.1.*.experts.2.*"], "experts.2.w1", "experts.0.w1"),
        (["*.experts.0.w2.weight"], "layers.0.block_sparse_moe.experts.0.w2", "layers.0.block_sparse_moe.experts.1.w2"),
    ):
        with pytest.raises(ConfigError, match=rf"{stays}.weight is frozen, \S*{trains}.weight is not; ranks hold"):
            frozen_tensors(spec, patterns, head=Head.LM, where="x")
    with pytest.raises(
        ConfigError, match=r"experts.0.w1.weight is frozen, \S*experts.0.w3.weight is not; Megatron holds"
    ):
        frozen_tensors(spec, ["*.w1.weight"], head=Head.LM, where="x")


def test_biases_alone_can_stay() -> None:
    assert len(frozen_tensors(SPEC, ["*.bias"], head=Head.LM, where="x")) == 36
