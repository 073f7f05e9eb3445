"""Qwen3 with experts in every layer: attention as in Qwen3, router without bias, no shared expert."""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP_NORM, QK_NORM, VALUE_HEAD
from rlhf.families.family import Experts, Family, TensorRule
from rlhf.families.spec import Part

_MLP = "model.layers.{layer}.mlp."
_EXPERT = _MLP + "experts.{expert}."

QWEN3_MOE = Family(
    name="qwen3_moe",
    class_stem="Qwen3Moe",
    qkv_bias=False,
    qk_norm=True,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "norm_topk_prob": False,
    },
    refused={
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,  # other steps and mlp_only_layers: some layers are dense
        "mlp_only_layers": [],
    },
    embed=EMBED,
    layer=(*ATTENTION, *QK_NORM, MLP_NORM, TensorRule(Part.ROUTER, _MLP + "gate.weight", ("experts", "hidden"))),
    experts=Experts(
        count_key="num_experts",
        ffn_key="moe_intermediate_size",
        norm_topk_prob=None,
        rules=(
            TensorRule(Part.EXPERT_GATE, _EXPERT + "gate_proj.weight", ("moe_ffn", "hidden")),
            TensorRule(Part.EXPERT_UP, _EXPERT + "up_proj.weight", ("moe_ffn", "hidden")),
            TensorRule(Part.EXPERT_DOWN, _EXPERT + "down_proj.weight", ("hidden", "moe_ffn")),
        ),
    ),
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
