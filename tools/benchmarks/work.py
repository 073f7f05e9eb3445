"""The identical work that every side does: models, prompts, sizes of a PPO step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhf.families.registry import hf_config, logical_tensors
from rlhf.families.spec import Head, ModelSpec

PROMPT_TOKENS, NEW_TOKENS = 32, 64
MOST_RUNNING, KV_TOKENS = 256, 256 * 128
"""Rows that SGLang's engines have under way, and their tokens: all of the largest batch."""

TINY = ModelSpec(
    family="llama",
    vocab_size=2048,
    hidden_size=256,
    ffn_size=688,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_positions=512,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
)
"""A random Llama of 4.2 million parameters."""

TINY_FOR_SGLANG = replace(TINY, ffn_size=704)
"""The same with an MLP that SGLang does not pad on CPUs, where it wants a multiple of 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kind of work: a model and the size of a PPO step on it."""

    name: str
    vocab_size: int
    """Prompt tokens are drawn below it."""
    num_prompts: int
    samples: int
    """Of each prompt."""
    minibatch: int
    """Responses in one optimizer step."""
    microbatch: int
    """Responses in one forward pass."""
    lr: float
    batches: tuple[int, ...]
    """Prompts that are answered at once in the rollout benchmark."""
    target_batch: int
    """The batch that the rollout target is for."""


WORKS = {
    "tiny": Work(
        name="tiny",
        vocab_size=2048,
        num_prompts=64,
        samples=4,
        minibatch=64,
        microbatch=32,
        lr=1e-5,
        batches=(16, 64, 256),
        target_batch=64,
    ),
    "smol": Work(
        name="smol",
        vocab_size=40_000,
        num_prompts=16,
        samples=4,
        minibatch=16,
        microbatch=8,
        lr=1e-6,
        batches=(1, 16, 64),
        target_batch=64,
    ),
}


def numbers(count: int, *, seed: int = 12345) -> list[int]:
    """Numbers 0 .. 2^23 - 1 that are the same everywhere: upper bits of C's old linear congruential generator."""
    state, found = seed, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        found.append(state >> 8)
    return found


def prompts(work: Work, count: int, *, lengths: Sequence[int] = ()) -> list[list[int]]:
    """Prompts as token ids, of PROMPT_TOKENS each or of the given lengths; special tokens (below 17) do not occur."""
    lengths = lengths or (PROMPT_TOKENS,) * count
    drawn = iter(numbers(sum(lengths)))
    return [[17 + next(drawn) % (work.vocab_size - 17) for _ in range(length)] for length in lengths]


def make_tiny(folder: Path, spec: ModelSpec = TINY) -> Path:
    """Write a tiny model as a Hugging Face folder: token i > 3 is the word ti, weights come from a fixed seed."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**hf_config(spec), **ends}), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weights = {
        tensor.name: (
            torch.ones(tensor.shape)
            if len(tensor.shape) == 1
            else torch.randn(tensor.shape, generator=generator) * spec.init_std
        )
        for tensor in logical_tensors(spec, head=Head.LM)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {"pad_token": "<pad>", "bos_token": "<begin>", "eos_token": "<end>", "unk_token": "<unknown>"}
    vocabulary = [*special.values(), *(f"t{i}" for i in range(len(special), spec.vocab_size))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=special["unk_token"]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **special}), encoding="utf-8")
    return folder
