"""Llama 1 to 3 and models of its kind (SmolLM2, TinyLlama): no biases, no QK norm."""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP, VALUE_HEAD
from rlhf.families.family import Family

LLAMA = Family(
    name="llama",
    class_stem="Llama",
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    refused={"attention_bias": False, "mlp_bias": False},
    embed=EMBED,
    layer=ATTENTION + MLP,
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
