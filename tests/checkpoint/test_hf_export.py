"""A model cut over ranks, written by them together, read back by transformers."""

import errno
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.checkpoint.hf_export import export_hf
from rlhf.dist.groups import GroupFactory
from rlhf.errors import CheckpointError, LayoutError, SaveError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.topology import Topology
from tests.harness.ranks import run_ranks

SPEC = ModelSpec(
    family="qwen2",
    vocab_size=53,
    hidden_size=24,
    ffn_size=36,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_positions=64,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
)


def halves(head: Head, dtype: str, ranks: tuple[int, ...]) -> ModelLayout:
    """Dim 0 of each tensor cut in two uneven parts."""
    tensors = {tensor.name: tensor.shape for tensor in logical_tensors(SPEC, head=head)}

    def holdings(rank: int) -> tuple[ParamLayout, ...]:
        found = []
        for name, shape in tensors.items():
            middle = shape[0] // 3
            rows = (0, middle) if rank == ranks[0] else (middle, shape[0])
            if rows[0] < rows[1]:
                spans = (rows, *((0, extent) for extent in shape[1:]))
                found.append(ParamLayout(name, Box(spans), f"my.{name}", (0,) * len(shape)))
        return tuple(found)

    return ModelLayout(tensors, dtype, ranks, holdings)


def full(head: Head, dtype: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(getattr(torch, dtype))
        for tensor in logical_tensors(SPEC, head=head)
    }


def export(folder: Path) -> None:
    """Ranks 1 and 2 of 3 hold the model; rank 0 passes by."""
    ranks, topology = (1, 2), Topology.blocks(3, ranks_per_node=2)
    group = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60)).cpu_group([ranks])
    for head, dtype, shard_bytes in [
        (Head.LM, "float32", 1 << 30),
        (Head.LM, "bfloat16", 6000),
        (Head.VALUE, "float32", 6000),
    ]:
        layout, tensors = halves(head, dtype, ranks), full(head, dtype)
        held = layout.holdings(dist.get_rank()) if group is not None else ()
        params = {one.param: tensors[one.tensor][one.box.slices].clone() for one in held}
        options = {"head": head, "source_folder": None, "group": group, "topology": topology}
        out = folder / f"{head.value}-{dtype}"
        export_hf(SPEC, layout, params, out, **options, shard_bytes=shard_bytes, bucket_bytes=1000)
        if group is not None:
            with pytest.raises(CheckpointError, match="exists"):
                export_hf(SPEC, layout, params, out, **options)
            other = {**options, "head": Head.VALUE if head is Head.LM else Head.LM}
            with pytest.raises(LayoutError, match=r"lm_head|score"):
                export_hf(SPEC, layout, params, folder / "never", **other)


def refused(folder: Path) -> None:
    """Ranks 0 and 1 export; calls of one of them fail, at one place after the other."""
    ranks, topology = (0, 1), Topology.blocks(2, ranks_per_node=2)
    group = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=30)).cpu_group([ranks])
    layout, tensors = halves(Head.LM, "float32", ranks), full(Head.LM, "float32")
    params = {one.param: tensors[one.tensor][one.box.slices].clone() for one in layout.holdings(dist.get_rank())}
    for name, failing in (("mkdir", 0), ("posix_fallocate", 0), ("posix_fallocate", 1), ("fsync", 1), ("rename", 0)):
        with pytest.MonkeyPatch.context() as patches:
            if dist.get_rank() == failing:
                patches.setattr(os, name, full_disk)
            with pytest.raises(SaveError, match=r"export to .*/out: .*No space left on device; needs a place to write"):
                export_hf(
                    SPEC,
                    layout,
                    params,
                    folder / "out",
                    head=Head.LM,
                    source_folder=None,
                    group=group,
                    topology=topology,
                    shard_bytes=6000,
                )
        dist.barrier()
        assert not list(folder.iterdir())


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.dist
def test_an_export_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    run_ranks(2, refused, tmp_path)


@pytest.mark.dist
def test_transformers_loads_an_export_of_two_ranks(tmp_path):
    run_ranks(3, export, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lm-bfloat16", "lm-float32", "value-float32"]
    for head, dtype, kind, count in [
        (Head.LM, "float32", AutoModelForCausalLM, 1),
        (Head.LM, "bfloat16", AutoModelForCausalLM, 4),
        (Head.VALUE, "float32", AutoModelForSequenceClassification, 4),
    ]:
        folder = tmp_path / f"{head.value}-{dtype}"
        assert len(list(folder.glob("*.safetensors"))) >= count
        model, tensors = kind.from_pretrained(folder, dtype="auto"), full(head, dtype)
        theirs = dict(model.named_parameters())  # a tied head is not listed twice
        assert theirs.keys() == tensors.keys()
        assert all(torch.equal(theirs[name], tensors[name]) for name in tensors)
        assert model.dtype is getattr(torch, dtype)
