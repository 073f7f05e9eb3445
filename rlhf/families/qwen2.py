"""Qwen2 and Qwen2.5, dense: biases on Q, K and V always."""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP, QKV_BIAS, VALUE_HEAD
from rlhf.families.family import Family

QWEN2 = Family(
    name="qwen2",
    class_stem="Qwen2",
    qkv_bias=True,
    qk_norm=False,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    refused={"use_sliding_window": False},
    embed=EMBED,
    layer=ATTENTION + QKV_BIAS + MLP,
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
