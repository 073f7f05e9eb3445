"""Checkpoints of the parity suite: tiny ones that transformers makes, with a tokenizer, and a real small model."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from rlhf.data.tokenizer import tiny_tokenizer
from tests.harness.hf_models import ROPE_LLAMA3, move_from_initial_values

COMMON = {
    "vocab_size": 300,
    "hidden_size": 44,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 307,
    "rms_norm_eps": 3e-5,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "pad_token_id": None,
}
"""The vocabulary is no multiple of any block, and larger than the tokenizer's; MLPs are what SGLang takes on CPUs."""
TINY = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": ROPE_LLAMA3}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True, "hidden_size": 64}),  # SGLang's has no head_dim
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False, "num_hidden_layers": 2}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "tie_word_embeddings": False,
            "num_hidden_layers": 2,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
}
REAL = "smollm2"
FAMILIES = (*TINY, REAL)
_REAL_FOLDER = Path(__file__).resolve().parents[3] / ".cache" / "smollm2"
_CORPUS = ("so the answer is 42.\n\n", "the next question: ")


@dataclass(frozen=True)
class Checkpoint:
    """A folder and what transformers makes of it."""

    family: str
    folder: Path
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase

    @property
    def eos(self) -> int:
        """The token that ends responses."""
        return self.tokenizer.eos_token_id


def checkpoint(family: str, folder: Path) -> Checkpoint:
    """Written to the folder; the real one lies elsewhere, and the test is skipped where it does not."""
    if family == REAL:
        if not (_REAL_FOLDER / "model.safetensors").exists():
            pytest.skip(f"needs SmolLM2-135M in {_REAL_FOLDER} (python -m tools.fetch_smollm2 {_REAL_FOLDER})")
        folder = _REAL_FOLDER
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return Checkpoint(family, folder, model.eval(), transformers.AutoTokenizer.from_pretrained(folder))
    tokenizer = tiny_tokenizer(folder, _CORPUS * 2, vocab_size=290)
    kind, extra = TINY[family]
    torch.manual_seed(sum(map(ord, family)))
    config = kind(**{**COMMON, **extra}, eos_token_id=tokenizer.eos_token_id)
    model = transformers.AutoModelForCausalLM.from_config(config)
    move_from_initial_values(model)
    model.save_pretrained(folder)
    return Checkpoint(family, folder, model.eval(), tokenizer)
