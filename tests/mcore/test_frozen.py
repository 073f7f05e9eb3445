"""Weights that training leaves alone: unchanged to the bit, in no norm, without gradient; the others as in float64."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.frozen import frozen_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.layer_spec import prepare_megatron
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import draw_weights
from rlhf.mcore.memory import model_bytes
from rlhf.mcore.model import build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.params import local_params
from tests.harness.ranks import run_ranks
from tests.mcore.test_memory import num_bytes
from tests.mcore.test_train_parity import Case, make_spec, prepare, run_case

POLICY, VALUE = make_spec("qwen3", tied=True), make_spec("llama", tied=False)
# The tied head with the embedding, the first layer, half of the third, one vector of the last.
OF_POLICY = ["model.embed_tokens.weight", "model.layers.0.*", "*.2.mlp.*", "*.3.self_attn.k_norm.weight"]
EXPERTS = replace(POLICY, family="qwen3_moe", num_experts=8, experts_per_token=3, moe_ffn_size=14, norm_topk_prob=True)
OF_EXPERTS = ["*.0.mlp.*", "*.1.mlp.gate.weight", "*.2.mlp.experts.*.down_proj.weight", "model.norm.weight"]
OF_VALUE = ["score.weight", "model.layers.[01].self_attn.*", "model.norm.weight"]
CASES = (
    ("policy", ParallelConfig(tp=2, pp=2)),
    ("policy", ParallelConfig(pp=2, dp=2, layers_per_stage=(1, 3))),  # the whole first stage is frozen
    ("policy", ParallelConfig(tp=4)),
    ("policy", ParallelConfig(pp=2, vpp=2, dp=2)),  # the whole first chunk is frozen
    ("experts", ParallelConfig(tp=2, dp=2, ep=2)),
    ("experts", ParallelConfig(pp=2, dp=2, ep=2, layers_per_stage=(1, 3))),  # no expert of the first stage is trained
    ("value", ParallelConfig(tp=2, pp=2)),
)


MODELS = {
    "policy": (POLICY, Head.LM, OF_POLICY),
    "experts": (EXPERTS, Head.LM, OF_EXPERTS),
    "value": (VALUE, Head.VALUE, OF_VALUE),
}


def frozen(name: str) -> frozenset[str]:
    spec, head, patterns = MODELS[name]
    return frozen_tensors(spec, patterns, head=head, where="freeze")


def check_memory(parallel: ParallelConfig, factory: GroupFactory) -> None:
    """Bytes foretold: no gradient and no optimizer state of what is frozen."""
    groups, cpu = make_groups(parallel, factory), torch.device("cpu")
    told = model_bytes(
        POLICY,
        parallel,
        head=Head.LM,
        dtype="bfloat16",
        trainable=True,
        stage=groups.pp_rank,
        frozen=frozen("policy"),
    )
    config = ModelConfig(path="-", dtype="bfloat16")
    model = build_model(
        POLICY, config, parallel, groups, head=Head.LM, device=cpu, seed=3, trainable=True, frozen=frozen("policy")
    )
    draw_weights(model)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    params = [param for module in model.modules for param in module.parameters()]
    trained = [param for param in params if param.requires_grad]
    assert all(not hasattr(param, "main_grad") for param in params if not param.requires_grad)
    assert num_bytes(params) == told.weights
    assert num_bytes(param.main_grad for param in trained) == told.gradients
    masters = [param for group in optimizer.megatron.param_groups for param in group["params"]]
    count = torch.tensor(float(sum(master.numel() for master in masters)))
    dist.all_reduce(count, group=groups.cpu_dp)  # each dp rank has its share of the masters
    assert count == sum(param.numel() for param in trained)


def check_ranks(folder: str) -> None:
    prepare_megatron(torch.device("cpu"))
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for number, (name, parallel) in enumerate(CASES):
        case = Case(parallel, (23, 4096, 23), recompute="full" if number < 2 else "none", frozen=frozen(name))
        spec, head, _ = MODELS[name]
        check_unchanged(case, spec, head, Path(folder) / name, factory)
        if spec is POLICY:
            check_memory(parallel, factory)


def check_unchanged(case: Case, spec: ModelSpec, head: Head, folder: Path, factory: GroupFactory) -> None:
    model = run_case(case, spec, head, folder, factory)
    assert model is not None
    start, params = torch.load(folder / "expected.pt", weights_only=False).start, local_params(model)
    for piece in megatron_layout(spec, case.parallel, head=head, dtype="float32").holdings(model.groups.rank):
        found = params[piece.param][piece.param_box(piece.box).slices]
        is_as_before = torch.equal(found, start[piece.tensor][piece.box.slices].float())
        assert is_as_before == (piece.tensor in case.frozen), piece.tensor


@pytest.mark.dist
def test_frozen_weights_stay_and_the_others_train_as_in_float64(tmp_path: Path) -> None:
    for name, (spec, head, _) in MODELS.items():
        expected = prepare(tmp_path / name, spec, head, frozen(name))
        assert {n for n, weight in expected.end.items() if torch.equal(weight, expected.start[n])} == frozen(name)
    run_ranks(4, check_ranks, str(tmp_path))
