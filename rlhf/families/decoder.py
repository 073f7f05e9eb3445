"""Tensors that all llama-like decoders share, under the names that Hugging Face checkpoints give them."""

from rlhf.families.family import TensorRule
from rlhf.families.spec import Part

_LAYER = "model.layers.{layer}."

EMBED = TensorRule(Part.EMBED, "model.embed_tokens.weight", ("vocab", "hidden"))
FINAL_NORM = TensorRule(Part.FINAL_NORM, "model.norm.weight", ("hidden",))
LM_HEAD = TensorRule(Part.LM_HEAD, "lm_head.weight", ("vocab", "hidden"))
VALUE_HEAD = TensorRule(Part.VALUE_HEAD, "score.weight", ("one", "hidden"))

ATTENTION = (
    TensorRule(Part.ATTN_NORM, _LAYER + "input_layernorm.weight", ("hidden",)),
    TensorRule(Part.Q, _LAYER + "self_attn.q_proj.weight", ("q", "hidden")),
    TensorRule(Part.K, _LAYER + "self_attn.k_proj.weight", ("kv", "hidden")),
    TensorRule(Part.V, _LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
    TensorRule(Part.ATTN_OUT, _LAYER + "self_attn.o_proj.weight", ("hidden", "q")),
)
QKV_BIAS = (
    TensorRule(Part.Q_BIAS, _LAYER + "self_attn.q_proj.bias", ("q",)),
    TensorRule(Part.K_BIAS, _LAYER + "self_attn.k_proj.bias", ("kv",)),
    TensorRule(Part.V_BIAS, _LAYER + "self_attn.v_proj.bias", ("kv",)),
)
QK_NORM = (
    TensorRule(Part.Q_NORM, _LAYER + "self_attn.q_norm.weight", ("head_dim",)),
    TensorRule(Part.K_NORM, _LAYER + "self_attn.k_norm.weight", ("head_dim",)),
)
MLP_NORM = TensorRule(Part.MLP_NORM, _LAYER + "post_attention_layernorm.weight", ("hidden",))
MLP = (
    MLP_NORM,
    TensorRule(Part.GATE, _LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
    TensorRule(Part.UP, _LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
    TensorRule(Part.DOWN, _LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),
)
