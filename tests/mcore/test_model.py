"""One rank: bfloat16 with fp32 gradients, and refusals. Layouts are proved in test_parity."""

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import LayoutError
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.layer_spec import prepare_megatron
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from tests.mcore.stand_in import tiny_spec
from tests.mcore.tiny import make_checkpoint, pack, sequences

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelGroups]:
    """A job of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield make_groups(ParallelConfig(), GroupFactory(device_backend="gloo", timeout=timedelta(seconds=30)))
    dist.destroy_process_group()


def loaded(folder: Path, groups: ModelGroups, dtype: str, *, trainable: bool) -> MegatronModel:
    config = ModelConfig(path="by-hand", dtype=dtype)
    model = build_model(
        read_spec(folder), config, ParallelConfig(), groups, head=Head.LM, device=CPU, seed=1, trainable=trainable
    )
    load_weights(model, folder)
    return model


def hidden_of(model: MegatronModel) -> torch.Tensor:
    packed = pack(sequences(model.spec.vocab_size), multiple_of=1)
    return model.chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)


def test_bfloat16_trains_with_fp32_gradients_and_masters(tmp_path: Path, groups: ModelGroups) -> None:
    make_checkpoint("qwen3", tmp_path, initializer_range=0.05)
    exact = hidden_of(loaded(tmp_path, groups, "float32", trainable=False))
    model = loaded(tmp_path, groups, "bfloat16", trainable=True)
    hidden = hidden_of(model)
    assert hidden.dtype is torch.bfloat16
    # 8 bits of mantissa through 3 layers
    assert float((hidden.float() - exact).abs().mean() / exact.abs().mean()) < 0.03
    (hidden @ head_weight(model).T).float().logsumexp(-1).sum().backward()
    model.chunk.finish_grad_sync()
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True, params_dtype=torch.bfloat16
    )
    optimizer = get_megatron_optimizer(
        config, [model.chunk], use_gloo_process_groups=False, pg_collection=groups.collection
    )
    before = head_weight(model).detach().clone()
    succeeded, grad_norm, _ = optimizer.step()
    assert succeeded
    assert math.isfinite(grad_norm)
    assert not torch.equal(head_weight(model), before)
    for param in model.module.parameters():
        assert param.dtype is torch.bfloat16
        assert param.main_grad.dtype is torch.float32
        assert param.main_param.dtype is torch.float32


def test_a_layout_that_the_model_does_not_admit_is_refused_by_name(groups: ModelGroups) -> None:
    with pytest.raises(LayoutError, match=r"parallel\.tp: 4 does not divide the model's num_kv_heads = 6"):
        build_model(
            tiny_spec(num_kv_heads=6),
            ModelConfig(path="by-hand"),
            ParallelConfig(tp=4),
            groups,
            head=Head.LM,
            device=CPU,
            seed=1,
            trainable=False,
        )


def test_a_process_with_models_on_the_cpu_builds_none_on_a_gpu() -> None:
    prepare_megatron(CPU)
    with pytest.raises(AssertionError, match="cannot build one on a GPU"):
        prepare_megatron(torch.device("cuda"))
