"""Mistral 7B and its kin (Nemo, Small): tensors as in Llama; the first generation looks back over a window only.

A config without `sliding_window` means 4096 positions, one with null means all; real ones have either (7B v0.1: 4096,
v0.2 and later: null).
"""

from rlhf.families.decoder import ATTENTION, EMBED, FINAL_NORM, LM_HEAD, MLP, VALUE_HEAD
from rlhf.families.family import Family

MISTRAL = Family(
    name="mistral",
    class_stem="Mistral",
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "sliding_window": 4096,
    },
    embed=EMBED,
    layer=ATTENTION + MLP,
    final_norm=FINAL_NORM,
    lm_head=LM_HEAD,
    value_head=VALUE_HEAD,
)
