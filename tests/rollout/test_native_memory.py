"""Bytes foretold against bytes that an engine takes."""

import pytest
import torch

from rlhf.config.rollout import RolloutConfig
from rlhf.families.registry import spec_of
from rlhf.rollout.native.engine import NativeEngine
from rlhf.rollout.native.memory import engine_bytes
from tests.rollout.tiny import CASES, COMMON


class Peer:
    """Stands in for a tensor-parallel group of two, which no communication uses before weights are there."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("tokens", [1000, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_and_cache_take_what_was_foretold(name: str, tokens: int, dtype: str, tp: int) -> None:
    config_class, extra = CASES[name]
    spec = spec_of(config_class(**{**COMMON, **extra}).to_dict(), where="tiny")
    config = RolloutConfig(tp=tp, kv_cache_tokens=tokens)
    group = Peer() if tp == 2 else None
    engine = NativeEngine(
        spec,
        config,
        tp_group=group,
        cpu_group=group,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        run_seed=1,
        eos_token_ids=(0,),
    )
    told = engine_bytes(spec, config, dtype=dtype, on_cpu=True)
    assert sum(param.untyped_storage().nbytes() for param in engine.params().values()) == told.weights
    assert sum(memory.untyped_storage().nbytes() for memory in engine._cache._memory) == told.kv_cache
    engine._model.pack()
    copies = [linear._packed for linear in engine._model._linears() if linear._packed is not None]
    assert sum(4 * copy.numel() for copy in copies) == told.packed
    assert (told.packed > 0) == (dtype == "float32")
    assert engine_bytes(spec, config, dtype=dtype, on_cpu=False).awake == told.kv_cache
