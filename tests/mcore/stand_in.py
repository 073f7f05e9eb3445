"""A rank's parameters without Megatron's module and without a job: any rank of any layout in one process."""

import torch

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups, model_grid
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.model import MegatronModel


def tiny_spec(**changes) -> ModelSpec:
    numbers = {
        "family": "llama",
        "vocab_size": 131,
        "hidden_size": 10,
        "ffn_size": 24,
        "num_layers": 4,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 6,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "max_positions": 64,
        "tied_embeddings": False,
        "qkv_bias": False,
        "qk_norm": False,
    }
    return ModelSpec(**{**numbers, **changes})


def tiny_moe_spec(**changes) -> ModelSpec:
    """Six experts of rows 14, two for a token; of family qwen3_moe unless told otherwise."""
    numbers = {
        "family": "qwen3_moe",
        "qk_norm": True,
        "num_experts": 6,
        "experts_per_token": 2,
        "moe_ffn_size": 14,
        "norm_topk_prob": True,
    }
    return tiny_spec(**{**numbers, **changes})


def stand_in_model(spec: ModelSpec, parallel: ParallelConfig, rank: int) -> MegatronModel:
    """Parameters are as large as the layout says, uninitialised."""
    shapes: dict[str, list[int]] = {}
    for piece in megatron_layout(spec, parallel, head=Head.LM, dtype="float32").holdings(rank):
        stops = [stop for _, stop in piece.param_box(piece.box).spans]
        shapes[piece.param] = [max(a, b) for a, b in zip(shapes.get(piece.param, stops), stops, strict=True)]
    params = [(name, torch.nn.Parameter(torch.empty(shape))) for name, shape in shapes.items()]
    module = torch.nn.Module()
    module.named_parameters = lambda: iter(params)
    groups = ModelGroups(model_grid(parallel), rank, None, None, None, None, None)
    return MegatronModel(spec, parallel, groups, Head.LM, None, (module,), (module,), torch.device("cpu"), 3)
