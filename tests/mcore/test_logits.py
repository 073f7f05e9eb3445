"""Hidden states times head weight equal transformers' logits in every layout, from the same checkpoint folder."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from tests.harness.ranks import run_ranks
from tests.mcore.tiny import CASES, make_checkpoint, pack, sequences

CPU = torch.device("cpu")


def forward(model: MegatronModel, packed) -> torch.Tensor:
    """Last stage's hidden states [T, 1, H] on all stages' ranks' last; passes activations by hand."""
    groups = model.groups
    pp = groups.collection.pp
    ranks = dist.get_process_group_ranks(pp)
    rows = packed.tokens.shape[1] // model.parallel.tp
    if not groups.is_first_stage:
        received = torch.empty(rows, 1, model.spec.hidden_size)
        dist.recv(received, ranks[groups.pp_rank - 1], group=pp)
        model.module.set_input_tensor(received)
    out = model.chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
    if not groups.is_last_stage:
        dist.send(out, ranks[groups.pp_rank + 1], group=pp)
    return out


def logits_of(model: MegatronModel, packed) -> torch.Tensor | None:
    """[num_real, vocabulary] on last-stage ranks."""
    hidden = forward(model, packed)
    if not model.groups.is_last_stage:
        return None
    assert hidden.shape == (packed.tokens.shape[1], 1, model.spec.hidden_size)
    part = hidden[: packed.num_real, 0] @ head_weight(model).T
    parts = [torch.empty_like(part) for _ in range(model.parallel.tp)]
    dist.all_gather(parts, part, group=model.groups.collection.tp)
    return torch.cat(parts, dim=1)[:, : model.spec.vocab_size]


def check_logits(root: Path, layouts: list[ParallelConfig]) -> None:
    torch.set_num_threads(1)
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for parallel in layouts:
        groups = make_groups(parallel, factory)
        if not groups.is_member:
            continue
        for name in CASES:
            spec = read_spec(root / name)
            if parallel.layers_per_stage and sum(parallel.layers_per_stage) != spec.num_layers:
                continue
            if not parallel.layers_per_stage and spec.num_layers % parallel.pp:
                continue
            model = build_model(
                spec, ModelConfig(path="by-hand"), parallel, groups, head=Head.LM, device=CPU, seed=1, trainable=False
            )
            load_weights(model, root / name)
            if parallel.tp == 2 and groups.tp_rank == 1 and groups.is_first_stage:
                embedding = model.module.embedding.word_embeddings.weight
                assert embedding.shape == (66, 42), embedding.shape
                assert (embedding[65] == 0).all(), "131 rows over 2 ranks leave one row of padding"
            with torch.no_grad():
                logits = logits_of(model, pack(sequences(spec.vocab_size), multiple_of=parallel.tp))
            if logits is not None:
                expected = torch.load(root / f"{name}.pt")
                # fp32 with other orders of summation over 4 layers: a few ulps of logits that reach about 5
                close = torch.allclose(logits, expected, atol=3e-5, rtol=1e-5)
                assert close, f"{name} {parallel}: off by {(logits - expected).abs().max()}"


LAYOUTS = [
    ParallelConfig(tp=1, pp=1, dp=1),
    ParallelConfig(tp=2, pp=1, dp=1, first_rank=1),
    ParallelConfig(tp=1, pp=2, dp=2),
    ParallelConfig(tp=2, pp=2),
    ParallelConfig(tp=2, pp=2, layers_per_stage=(2, 1)),
    ParallelConfig(tp=1, pp=3, layers_per_stage=(1, 2, 1), first_rank=1),
]


@pytest.mark.dist
def test_logits_equal_transformers_in_every_layout(tmp_path: Path) -> None:
    for name in CASES:
        model = make_checkpoint(name, tmp_path / name)
        with torch.no_grad():
            rows = [model(row[None]).logits[0] for row in sequences(model.config.vocab_size)]
        torch.save(torch.cat(rows), tmp_path / f"{name}.pt")
    run_ranks(4, check_logits, tmp_path, LAYOUTS)
