"""An actor's weights into a real SGLang engine of two ranks: its answers are then those of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlhf.config.parallel import ParallelConfig
from rlhf.families.registry import spec_of
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.rollout.sglang.layout import sglang_layout
from tests.harness.hf_models import move_from_initial_values
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table
from tests.rollout.sglang.test_layout import SPECS
from tests.rollout.sglang.tiny import needs_sglang
from tests.rollout.sglang.weights.weight_ranks import GREEDY, Answers, Case, actor_into_engine, built
from tests.rollout.test_native_engine import greedy_reference
from tests.rollout.tiny import COMMON, hf_model, prompts, reference_logprobs

pytestmark = [*needs_sglang, pytest.mark.dist]
LENGTHS = (9, 1, 23, 4)
BUILT = {**SPECS, "mixtral": replace(SPECS["mixtral"], hidden_size=64, tied_embeddings=False)}
"""SGLang's Mixtral takes hidden_size / num_heads for its head dim, and its own loader cannot tie."""
ALIGNED = {"intermediate_size": 128}
"""On CPUs SGLang pads MLPs to a multiple of 32 a rank, which the layout does not describe."""


def answers_of(model: transformers.PreTrainedModel, folder: Path) -> Answers:
    model.save_pretrained(folder)  # under the names of hub checkpoints
    rows = prompts(LENGTHS).tokens.rows()
    said = [greedy_reference(model, row, GREEDY.max_new_tokens) for row in rows]
    logprobs = [reference_logprobs(model, row, response) for row, response in zip(rows, said, strict=True)]
    return Answers(load_file(folder / "model.safetensors"), tuple(tuple(row.tolist()) for row in said), tuple(logprobs))


def case_of(
    model: transformers.PreTrainedModel, folder: Path, parallel: ParallelConfig, *, first_rank: int, ep: int
) -> Case:
    spec = spec_of(model.config.to_dict(), where="tiny")
    first = answers_of(model, folder)
    changed = tuple(name for name in first.weights if "norm" in name or ("layers.1." in name and "_proj" not in name))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in changed:
                param.add_(torch.randn_like(param) * 0.2)
    second = answers_of(model, folder / "second")
    assert first.tokens != second.tokens
    assert all(
        torch.equal(first.weights[name], second.weights[name]) == (name not in changed) for name in first.weights
    )
    return Case(
        spec=spec,
        folder=folder,
        src=as_table(megatron_layout(spec, parallel, head=Head.LM, dtype="float32")),
        dst=as_table(sglang_layout(spec, tp=2, ep=ep, dp=1, first_rank=first_rank, dtype="float32")),
        ep=ep,
        prompts=prompts(LENGTHS),
        answers=(first, second),
        changed=changed,
    )


def test_dense_from_megatron_on_four_ranks_into_an_engine_on_two_others(tmp_path):
    """Tied embedding, vocabulary padded on both sides; and our tables against SGLang's own modules and loaders."""
    case = case_of(
        hf_model("qwen3", tie_word_embeddings=True, **ALIGNED),
        tmp_path,
        ParallelConfig(tp=2, pp=2),
        first_rank=4,
        ep=1,
    )
    sizes = [
        ("llama", 4, 1),
        ("mistral", 2, 1),
        ("qwen2", 2, 1),
        ("qwen3", 4, 1),
        ("qwen3_moe", 4, 2),
        ("qwen3_moe", 2, 1),
    ]
    sizes += [("mixtral", 2, 2), ("mixtral", 4, 1)]
    builds = [built(BUILT[name], tp=tp, ep=ep, rank=rank) for name, tp, ep in sizes for rank in range(tp)]
    run_ranks(6, actor_into_engine, case, True, builds)


def test_experts_from_four_ranks_into_an_engine_on_two_of_them(tmp_path):
    """The actor's ranks hold whole experts, the engine's cut each in two: on CPUs SGLang runs no other way."""
    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(
        **{**COMMON, **ALIGNED, "num_hidden_layers": 2},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    move_from_initial_values(model)
    case = case_of(model.eval(), tmp_path, ParallelConfig(tp=2, pp=2, ep=2), first_rank=1, ep=1)
    run_ranks(4, actor_into_engine, case, False, [])
