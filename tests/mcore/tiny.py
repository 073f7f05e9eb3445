"""Tiny checkpoints of every family with nothing equal and nothing at its initial value, and packed inputs for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tests.harness.hf_models import ROPE_LLAMA3, move_from_initial_values

if TYPE_CHECKING:  # ranks that only read the checkpoints need not wait for the import
    import transformers

LENGTHS = (7, 1, 19, 4, 12)
"""Of the packed sequences; 43 tokens, so that tp 2 needs a padding sequence."""

COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 97,
    "rms_norm_eps": 3e-5,
    "initializer_range": 0.15,
    "attention_dropout": 0.0,
}

CASES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": ROPE_LLAMA3}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
    "mistral": ("MistralConfig", {"tie_word_embeddings": True, "sliding_window": 23}),
    "deep": ("Qwen2Config", {"tie_word_embeddings": False, "num_hidden_layers": 7}),
}
"""Name -> config class and what differs from COMMON. The window is as long as the longest row that any test gives."""

_EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 3}
MOE_CASES = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "moe_intermediate_size": 44, "norm_topk_prob": True}),
    "qwen3_moe_raw": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 44, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_hidden_layers": 3}),
}
"""With experts; the second does not divide the probabilities of a token's experts by their sum."""


def make_checkpoint(
    name: str, folder: Path, *, num_labels: int = 0, **changes: object
) -> "transformers.PreTrainedModel":
    """Random model in eval mode, saved in folder; num_labels > 0 gives a sequence classifier."""
    import transformers

    config_class, extra = {**CASES, **MOE_CASES}[name]
    config = getattr(transformers, config_class)(**{**COMMON, **extra, **changes})
    torch.manual_seed(sum(map(ord, name)))
    if num_labels:
        config.num_labels = num_labels
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    move_from_initial_values(model)
    model.eval().save_pretrained(folder)
    if name in MOE_CASES:
        model.set_experts_implementation("eager")  # the grouped one wants sizes that are multiples of 16 bytes
    return model


@dataclass(frozen=True)
class Packed:
    """Sequences one after the other, with a dummy sequence at the end that makes them a multiple of tp."""

    tokens: Tensor
    positions: Tensor
    params: PackedSeqParams
    num_real: int


def sequences(vocab_size: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]


def pack(rows: list[Tensor], *, multiple_of: int) -> Packed:
    real = sum(len(row) for row in rows)
    if pad := -real % multiple_of:
        rows = [*rows, torch.zeros(pad, dtype=torch.int64)]
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    cu_seqlens = lengths.cumsum(0).to(torch.int32)
    longest = int(lengths.max())
    return Packed(
        tokens=torch.cat(rows)[None],
        positions=torch.cat([torch.arange(len(row)) for row in rows])[None],
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        num_real=real,
    )
