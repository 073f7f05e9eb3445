"""Stored tensors of a tiny model put together by hand from its Hugging Face tensors: no code is shared with ours."""

import torch
from torch import Tensor


def stored_by_hand(tensors: dict[str, Tensor], *, layers: int, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Megatron's keys and whole tensors of a llama, or of a mixtral, with a head of its own."""
    found = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    of_layers: dict[str, list[Tensor]] = {}
    for layer in range(layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        q, k, v = (own[f"self_attn.{name}_proj.weight"] for name in "qkv")
        dim = k.shape[0] // kv_heads
        rows = []
        for head in range(kv_heads):
            each = heads // kv_heads * dim
            rows += [q[head * each : (head + 1) * each], *(one[head * dim : (head + 1) * dim] for one in (k, v))]
        parts = {
            "self_attention.linear_qkv.weight": torch.cat(rows),
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        }
        if "mlp.gate_proj.weight" in own:
            parts |= {
                "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
                "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
                "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
            }
        else:
            stem = "block_sparse_moe.experts"
            count = sum(name.endswith("w1.weight") for name in own)
            fc1 = [torch.cat([own[f"{stem}.{at}.w1.weight"], own[f"{stem}.{at}.w3.weight"]]) for at in range(count)]
            parts |= {
                "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
                "mlp.router.weight": own["block_sparse_moe.gate.weight"],
                "mlp.experts.experts.linear_fc1.weight": torch.stack(fc1),
                "mlp.experts.experts.linear_fc2.weight": torch.stack(
                    [own[f"{stem}.{at}.w2.weight"] for at in range(count)]
                ),
            }
        for name, tensor in parts.items():
            of_layers.setdefault(f"decoder.layers.{name}", []).append(tensor)
    return found | {key: torch.stack(ones) for key, ones in of_layers.items()}
