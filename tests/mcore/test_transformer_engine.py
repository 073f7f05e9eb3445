"""Layers of Transformer Engine on a GPU give transformers' hidden states. In a process without CPU shims."""

from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import build_model
from tests.harness.ranks import run_ranks
from tests.mcore.tiny import CASES, make_checkpoint, pack, sequences


def check_hidden_states(root: Path) -> None:
    device = torch.device("cuda")
    groups = make_groups(ParallelConfig(), GroupFactory(device_backend="nccl", timeout=timedelta(seconds=60)))
    for case in CASES:
        spec = read_spec(root / case)
        config = ModelConfig(path="by-hand", dtype="bfloat16")
        model = build_model(
            spec, config, ParallelConfig(), groups, head=Head.LM, device=device, seed=1, trainable=False
        )
        load_weights(model, root / case)
        packed = pack(sequences(spec.vocab_size), multiple_of=1)
        cu_seqlens = packed.params.cu_seqlens_q.cuda()
        params = replace(packed.params, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        with torch.no_grad():
            out = model.chunk(packed.tokens.cuda(), packed.positions.cuda(), None, packed_seq_params=params)
        expected = torch.load(root / f"{case}.hidden.pt")
        # 8 bits of mantissa through at most 4 layers
        off = float((out[:, 0].float().cpu() - expected).abs().mean() / expected.abs().mean())
        assert off < 0.03, f"{case}: off by {off}"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("transformer_engine") is None,
    reason="needs a CUDA device and transformer_engine",
)
def test_hidden_states_equal_transformers(tmp_path: Path) -> None:
    for case in CASES:
        model = make_checkpoint(case, tmp_path / case, initializer_range=0.05)
        with torch.no_grad():
            rows = [model.model(row[None]).last_hidden_state[0] for row in sequences(model.config.vocab_size)]
        torch.save(torch.cat(rows), tmp_path / f"{case}.hidden.pt")
    run_ranks(1, check_hidden_states, tmp_path)
