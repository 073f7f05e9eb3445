"""Mixtral: attention as in Llama, experts in every layer, whose probabilities are always divided by their sum."""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP_NORM, VALUE_HEAD
from rlhf.families.family import Experts, Family, TensorRule
from rlhf.families.spec import Part

_MLP = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."

MIXTRAL = Family(
    name="mixtral",
    class_stem="Mixtral",
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    refused={"sliding_window": None, "router_jitter_noise": 0.0},
    embed=EMBED,
    layer=(*ATTENTION, MLP_NORM, TensorRule(Part.ROUTER, _MLP + "gate.weight", ("experts", "hidden"))),
    experts=Experts(
        count_key="num_local_experts",
        ffn_key="intermediate_size",
        norm_topk_prob=True,
        rules=(
            TensorRule(Part.EXPERT_GATE, _EXPERT + "w1.weight", ("moe_ffn", "hidden")),
            TensorRule(Part.EXPERT_UP, _EXPERT + "w3.weight", ("moe_ffn", "hidden")),
            TensorRule(Part.EXPERT_DOWN, _EXPERT + "w2.weight", ("hidden", "moe_ffn")),
        ),
    ),
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
