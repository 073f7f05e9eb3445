"""Folders as Megatron-LM's `--ckpt-format torch` writes them, cut by code that shares nothing with ours."""

import random
import signal
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from rlhf.families.spec import ModelSpec

PADDED_TO = 128
"""Megatron-LM's default: the vocabulary becomes a multiple of this times tp."""


def args_of(spec: ModelSpec, *, tp: int, pp: int, vpp: int, **others: object) -> Namespace:
    """A few of its arguments, of the kinds that they have."""
    found = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "expert_model_parallel_size": 1,
        "num_experts": None,
        "params_dtype": torch.float32,
        "attention_backend": AttnBackend.auto,
        "exit_signal": signal.SIGTERM,
        "data_path": ["a", "b"],
        "adam_eps": 1e-8,
    }
    return Namespace(**{**found, **others})


def layer_of_rank(spec: ModelSpec, weights: Mapping[str, Tensor], layer: int, *, tp: int, rank: int) -> dict:
    """One dense layer's tensors on a tensor-parallel rank, by the names inside a layer of Transformer Engine."""
    of = {name.removeprefix(f"model.layers.{layer}."): weight for name, weight in weights.items()}
    groups, dim = spec.num_kv_heads, spec.head_dim

    def fused(kind: str) -> Tensor:
        q, k, v = (of[f"self_attn.{one}_proj.{kind}"] for one in "qkv")
        parts = [one.view(groups, -1, *one.shape[1:]) for one in (q, k, v)]
        return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:]).chunk(tp)[rank].clone()

    found = {
        "self_attention.linear_qkv.layer_norm_weight": of["input_layernorm.weight"],
        "self_attention.linear_qkv.weight": fused("weight"),
        "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"].chunk(tp, dim=1)[rank].clone(),
        "mlp.linear_fc1.layer_norm_weight": of["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([of[f"mlp.{one}_proj.weight"].chunk(tp)[rank] for one in ("gate", "up")]),
        "mlp.linear_fc2.weight": of["mlp.down_proj.weight"].chunk(tp, dim=1)[rank].clone(),
    }
    assert dim * (spec.num_heads + 2 * groups) // tp == len(found["self_attention.linear_qkv.weight"])
    if spec.qkv_bias:
        found["self_attention.linear_qkv.bias"] = fused("bias")
    return found


def padded(weight: Tensor, *, tp: int, rank: int) -> Tensor:
    """A rank's rows of a vocabulary whose padding is no zeros, as in Megatron-LM after training."""
    rows = -(-len(weight) // (PADDED_TO * tp)) * PADDED_TO * tp
    return torch.cat([weight, torch.full((rows - len(weight), weight.shape[1]), 7.0)]).chunk(tp)[rank].clone()


def save_dense(
    folder: Path, spec: ModelSpec, weights: Mapping[str, Tensor], *, tp: int, chunks: tuple[tuple[int, ...], ...]
) -> None:
    """Write `iter_0000070` and the tracker; `chunks` are layers of each chunk of each stage, stage by stage."""
    pp, vpp, before = len(chunks), len(chunks[0]), 0
    starts = {}
    for chunk in range(vpp):
        for stage in range(pp):
            starts[stage, chunk] = before
            before += chunks[stage][chunk]
    args = args_of(spec, tp=tp, pp=pp, vpp=vpp)
    for stage in range(pp):
        for rank in range(tp):
            models = []
            for chunk in range(vpp):
                model = {}
                if (stage, chunk) == (0, 0):
                    model["embedding.word_embeddings.weight"] = padded(
                        weights["model.embed_tokens.weight"], tp=tp, rank=rank
                    )
                for number in range(chunks[stage][chunk]):
                    layer = layer_of_rank(spec, weights, starts[stage, chunk] + number, tp=tp, rank=rank)
                    model |= {f"decoder.layers.{number}.{name}": weight for name, weight in layer.items()}
                    model[f"decoder.layers.{number}.self_attention.linear_qkv._extra_state"] = None
                if (stage, chunk) == (pp - 1, vpp - 1):
                    model["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
                    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
                    if pp > 1 or not spec.tied_embeddings:
                        model["output_layer.weight"] = padded(head, tp=tp, rank=rank)
                models.append(model)
            stage_name = f"_{stage:03d}" if pp > 1 else ""
            save_rank(folder / "iter_0000070" / f"mp_rank_{rank:02d}{stage_name}" / "model_optim_rng.pt", args, models)
    (folder / "latest_checkpointed_iteration.txt").write_text("70")


def save_rank(path: Path, args: Namespace, models: list[dict], **others: object) -> None:
    """One rank's file, with what Megatron-LM keeps beside the model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # Megatron-LM's own call
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 70,
        "num_floating_point_operations_so_far": 1.5e9,
        "optimizer": {"optimizer": {"param_groups": [{"lr": 1e-6, "step": 70}]}, "grad_scaler": {"scale": 1.0}},
        "opt_param_scheduler": {"max_lr": 1e-5, "num_steps": 70},
        "rng_state": [rng],
        **others,
    }
    for number, model in enumerate(models):
        content["model" if len(models) == 1 else f"model{number}"] = model
    torch.save(content, path)
