"""Bytes foretold against bytes that real tiny models, their gradient buffers and optimizers take."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.agree import gather
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups, expert_grid, make_groups
from rlhf.mcore.layout import param_shapes
from rlhf.mcore.load import draw_weights
from rlhf.mcore.memory import model_bytes
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.params import local_params
from tests.harness.ranks import run_ranks
from tests.mcore.stand_in import tiny_moe_spec, tiny_spec

ODD = {"hidden_size": 18, "ffn_size": 28, "vocab_size": 131}  # no size is a multiple of a bucket's or a shard's
CASES: tuple[tuple[ModelSpec, ParallelConfig, Head, str], ...] = (
    (tiny_spec(**ODD), ParallelConfig(tp=2, pp=2), Head.LM, "float32"),
    (tiny_spec(**ODD), ParallelConfig(tp=2, dp=2), Head.VALUE, "float32"),
    (tiny_spec(**ODD, tied_embeddings=True), ParallelConfig(pp=2, dp=2), Head.LM, "bfloat16"),
    (tiny_spec(**ODD, family="qwen2", qkv_bias=True, tied_embeddings=True), ParallelConfig(dp=4), Head.LM, "bfloat16"),
    (tiny_spec(**ODD, family="qwen2", qkv_bias=True, num_kv_heads=2), ParallelConfig(tp=4), Head.LM, "float32"),
    (
        tiny_spec(**ODD, family="qwen3", qk_norm=True),
        ParallelConfig(tp=2, pp=2, layers_per_stage=(1, 3)),
        Head.VALUE,
        "bfloat16",
    ),
    # Experts' replicas are the dp peers; then there are none.
    (tiny_moe_spec(**ODD), ParallelConfig(tp=2, dp=2, ep=2), Head.LM, "float32"),
    (tiny_moe_spec(**ODD, family="mixtral", qk_norm=False), ParallelConfig(dp=4, ep=2, etp=2), Head.VALUE, "bfloat16"),
    (
        tiny_spec(**ODD, num_layers=7, tied_embeddings=True),
        ParallelConfig(pp=2, vpp=3, dp=2, layers_per_stage=(1, 1, 2, 1, 1, 1)),
        Head.LM,
        "bfloat16",
    ),
)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind some tensors, once each."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def built(spec: ModelSpec, parallel: ParallelConfig, head: Head, dtype: str, groups: ModelGroups, *, trainable: bool):
    model = build_model(
        spec,
        ModelConfig(path="-", dtype=dtype),
        parallel,
        groups,
        head=head,
        device=torch.device("cpu"),
        seed=3,
        trainable=trainable,
    )
    draw_weights(model)
    return model


def params_of(model: MegatronModel) -> list[Tensor]:
    """Of all its chunks."""
    return [param for module in model.modules for param in module.parameters()]


def optimizer_elements(model: MegatronModel) -> tuple[int, int]:
    """(elements of fp32 masters, elements of moments) on this rank after a step. Collective over the pool."""
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    assert not optimizer.step().skipped
    weights = {param.untyped_storage().data_ptr() for param in params_of(model)}
    masters = [p for group in optimizer.megatron.param_groups for p in group["params"]]
    masters = [p for p in masters if p.untyped_storage().data_ptr() not in weights]
    moments = []
    for part in optimizer.megatron.chained_optimizers:
        for state in part.optimizer.state.values():
            moments += [t for t in state.values() if isinstance(t, Tensor) and t.dim()]  # `step` has no dim
    assert all(t.dtype is torch.float32 for t in (*masters, *moments))
    return sum(t.numel() for t in masters), sum(t.numel() for t in moments)


def check_layouts() -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for case in CASES:
        spec, parallel, head, dtype = case
        groups = make_groups(parallel, factory)
        frozen = built(*case, groups, trainable=False)
        stage = groups.pp_rank
        assert {name: tuple(param.shape) for name, param in local_params(frozen).items()} == param_shapes(
            spec, parallel, head=head, stage=stage
        )
        told = model_bytes(spec, parallel, head=head, dtype=dtype, trainable=False, stage=stage)
        assert num_bytes(params_of(frozen)) == told.weights == told.total, case
        model = built(*case, groups, trainable=True)
        told = model_bytes(spec, parallel, head=head, dtype=dtype, trainable=True, stage=stage)
        params = params_of(model)
        assert sum(param.numel() for param in params) == told.parameters, case
        assert num_bytes(params) == told.weights, case
        assert num_bytes(param.main_grad for param in params) == told.gradients, case
        masters, moments = optimizer_elements(model)
        assert masters == (moments // 2 if dtype == "bfloat16" else 0)
        # Replicas share the state of all parameters; what a rank keeps is its share but for padding.
        shared = gather((masters, moments), groups.cpu_dp)
        experts = sum(param.numel() for name, param in local_params(model).items() if ".experts." in name)
        of_others = experts * (parallel.dp // expert_grid(parallel).size("edp") - 1)  # dp peers with other experts
        assert sum(of_rank for _, of_rank in shared) == 2 * (told.parameters + of_others), case
        padding = told.gradients // 4 - told.parameters
        for of_rank in shared:
            missing = told.optimizer - 4 * sum(of_rank)
            assert 0 <= missing <= padding * (12 if masters else 8), case
        dist.barrier()


def test_bytes_are_those_of_real_models_in_several_layouts() -> None:
    run_ranks(4, check_layouts)
