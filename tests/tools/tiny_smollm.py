"""A random llama of SmolLM2's kind as llama.cpp would write it: weights, tokenizer and chat template in one file."""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.harness.gguf import f32, write_gguf
from tests.harness.hf_models import move_from_initial_values

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONFIG = LlamaConfig(
    vocab_size=263,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=320,
    rms_norm_eps=1e-5,
    rope_theta=733.0,
    tie_word_embeddings=True,
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama_cpp_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k as llama.cpp has them: dims i and i + head_dim / 2 of a head become neighbours."""
    out = np.empty_like(weight)
    for row in range(len(weight)):
        head, dim = divmod(row, head_dim)
        second, pair = divmod(dim, head_dim // 2)
        out[head * head_dim + 2 * pair + second] = weight[row]
    return out


def byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, as GPT-2's tokenizer has them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def tiny_gguf(path: Path) -> LlamaForCausalLM:
    """A random model of CONFIG and a tokenizer of bytes and four merges, written as llama.cpp would."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(CONFIG).eval()
    move_from_initial_values(model)
    tensors = {}
    for name, weight in model.state_dict().items():
        stem, array = name.removesuffix(".weight"), weight.numpy()
        if stem == "lm_head":
            continue
        if stem.startswith("model.layers."):
            layer, of = stem.removeprefix("model.layers.").split(".", 1)
            if of in ("self_attn.q_proj", "self_attn.k_proj"):
                array = llama_cpp_rows(array, CONFIG.head_dim)
            tensors[f"blk.{layer}.{NAMES[of]}.weight"] = f32(array)
        else:
            tensors[{"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem] + ".weight"] = f32(array)
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    tokens = [*SPECIAL, *byte_symbols(), *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "llama.vocab_size": CONFIG.vocab_size,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": CONFIG.intermediate_size,
        "llama.block_count": CONFIG.num_hidden_layers,
        "llama.attention.head_count": CONFIG.num_attention_heads,
        "llama.attention.head_count_kv": CONFIG.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 733.0,
        "llama.context_length": CONFIG.max_position_embeddings,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert len(tokens) == CONFIG.vocab_size
    write_gguf(path, metadata, tensors)
    return model
