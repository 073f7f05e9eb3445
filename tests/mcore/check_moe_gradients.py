"""Gradients of models with experts, and their global norm, against transformers in float64."""

from pathlib import Path

import torch

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import build_model
from rlhf.mcore.optimizer import build_optimizer
from tests.mcore.check_gradients import CPU, check_gradients, expected_gradients, run_backward

TRAINED = [
    ("qwen3_moe", ParallelConfig(tp=2, pp=2), "none"),
    ("qwen3_moe", ParallelConfig(tp=2, dp=2, ep=4), "full"),
    ("qwen3_moe_raw", ParallelConfig(dp=4, ep=2, etp=2), "none"),
    ("qwen3_moe_raw", ParallelConfig(pp=2, dp=2, ep=2, layers_per_stage=(1, 2)), "none"),
    ("mixtral", ParallelConfig(tp=2, dp=2, ep=2), "none"),
    ("mixtral", ParallelConfig(tp=2, dp=2, etp=2), "full"),
]
"""Experts that are replicas over tp, over dp and over neither; shared and tied embeddings apart."""


def hub_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """Of transformers' model in float64, one tensor an expert as in hub checkpoints."""
    is_mixtral = read_spec(folder).family == "mixtral"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, grad in expected_gradients(folder, Head.LM).items():
        stem, _, fused = name.rpartition(".mlp.experts.")
        if not stem:
            found[name.replace(".mlp.gate.", f".{block}.gate.")] = grad
            continue
        for expert, of_one in enumerate(grad):
            at = f"{stem}.{block}.experts.{expert}"
            if fused == "down_proj":
                found[f"{at}.{down}.weight"] = of_one
            else:
                found[f"{at}.{gate}.weight"], found[f"{at}.{up}.weight"] = of_one.chunk(2)
    return found


def check_all_moe_gradients(root: Path, factory: GroupFactory) -> None:
    for case, parallel, recompute in TRAINED:
        groups = make_groups(parallel, factory)
        spec = read_spec(root / case)
        config = ModelConfig(path="by-hand", recompute=recompute)
        model = build_model(spec, config, parallel, groups, head=Head.LM, device=CPU, seed=1, trainable=True)
        load_weights(model, root / case)
        optimizer = build_optimizer(model, OptimConfig(lr=0.02))
        run_backward(model)
        what, expected = f"{case} {parallel} {recompute}", torch.load(root / f"{case}.grads.pt")
        check_gradients(model, expected, what)
        found, norm = optimizer.step().grad_norm, float(torch.stack([grad.norm() for grad in expected.values()]).norm())
        assert abs(found / norm - 1) < 1e-6, f"{what}: norm {found}, expected {norm}"
