"""Tiny transformers models with nothing equal or at its initial value, and native engines with their weights."""

from collections.abc import Mapping

import torch
import transformers
from torch import Tensor

from rlhf.config.rollout import RolloutConfig
from rlhf.data.batch import PromptBatch, PromptRecord
from rlhf.data.ragged import Ragged
from rlhf.families.registry import logical_tensors, spec_of
from rlhf.families.spec import Head, Part
from rlhf.reshard.layout import ModelLayout
from rlhf.rollout.native.engine import NativeEngine
from tests.harness.hf_models import ROPE_LLAMA3, move_from_initial_values

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 131,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 307,
    "rms_norm_eps": 3e-5,
    "initializer_range": 0.15,
}
MOE = {"num_experts_per_tok": 3, "num_hidden_layers": 2, "tie_word_embeddings": False}
CASES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False, "rope_parameters": ROPE_LLAMA3}),
    "mistral": (transformers.MistralConfig, {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False, "num_hidden_layers": 2}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**MOE, "num_experts": 7, "moe_intermediate_size": 20, "norm_topk_prob": False},
    ),
    "mixtral": (transformers.MixtralConfig, {**MOE, "num_local_experts": 5, "intermediate_size": 28}),
}
LENGTHS = (9, 1, 23, 4, 70, 2)
"""Of the prompts: one token, and more than one span of attention."""


def hf_model(name: str, **changes: object) -> transformers.PreTrainedModel:
    """Random model in eval mode."""
    config_class, extra = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**COMMON, **extra, **changes}))
    move_from_initial_values(model)
    return model.eval()


def hub_weights(model: transformers.PreTrainedModel) -> Mapping[str, Tensor]:
    """The model's weights by the names of its checkpoints, in which experts are not fused."""
    spec, weights = spec_of(model.config.to_dict(), where="tiny"), dict(model.state_dict())
    for tensor in logical_tensors(spec, head=Head.LM) if spec.num_experts else ():
        mlp = f"model.layers.{tensor.layer}.mlp."
        if tensor.part is Part.ROUTER:
            weights[tensor.name] = weights[mlp + "gate.weight"]
        elif tensor.part is Part.EXPERT_DOWN:
            weights[tensor.name] = weights[mlp + "experts.down_proj"][tensor.expert]
        elif tensor.expert >= 0:
            gate, up = weights[mlp + "experts.gate_up_proj"][tensor.expert].chunk(2)
            weights[tensor.name] = gate if tensor.part is Part.EXPERT_GATE else up
    return weights


def fill(params: Mapping[str, Tensor], layout: ModelLayout, rank: int, weights: Mapping[str, Tensor]) -> None:
    """Write a rank's blocks of the logical tensors into its parameters, as a weight sync would."""
    with torch.no_grad():
        for piece in layout.holdings(rank):
            params[piece.param][piece.param_box(piece.box).slices] = weights[piece.tensor][piece.box.slices]


def make_engine(model: transformers.PreTrainedModel, *, rank: int = 0, groups=(None, None), **settings) -> NativeEngine:
    """Engine of tp ranks with the model's weights; `settings` go to RolloutConfig or to the engine."""
    own = {
        k: settings.pop(k)
        for k in ("eos_token_ids", "on_progress", "run_seed", "decode", "performance")
        if k in settings
    }
    config = RolloutConfig(**{"kv_cache_tokens": 4096, **settings})
    engine = NativeEngine(
        spec_of(model.config.to_dict(), where="tiny"),
        config,
        tp_group=groups[0],
        cpu_group=groups[1],
        device=CPU,
        dtype=torch.float32,
        **{"run_seed": 11, "eos_token_ids": (), **own},
    )
    fill(engine.params(), engine.layout(), rank, hub_weights(model))
    return engine


def prompts(lengths=LENGTHS, *, samples: int = 1, seed: int = 5, vocab_size: int = 131) -> PromptBatch:
    """Random prompts of these lengths, each repeated `samples` times."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]
    repeated = [row for row in rows for _ in range(samples)]
    return PromptBatch(
        sample_ids=torch.arange(len(repeated)) + 1000,
        prompt_ids=torch.arange(len(rows)).repeat_interleave(samples),
        tokens=Ragged.of(repeated, dtype=torch.int64),
        records=(PromptRecord("", "", {}),) * len(repeated),
    )


def reference_logprobs(model, prompt: Tensor, response: Tensor, temperature: float = 1.0) -> Tensor:
    """Of the response's tokens, by transformers, in one forward pass."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
