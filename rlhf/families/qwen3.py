"""Qwen3, dense: RMSNorm on every head of Q and K, head_dim apart from hidden / heads, no biases."""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP, QK_NORM, VALUE_HEAD
from rlhf.families.family import Family

QWEN3 = Family(
    name="qwen3",
    class_stem="Qwen3",
    qkv_bias=False,
    qk_norm=True,
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    refused={"attention_bias": False, "use_sliding_window": False},
    embed=EMBED,
    layer=ATTENTION + QK_NORM + MLP,
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
