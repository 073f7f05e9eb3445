"""A model started from another's weights in memory equals one that read the checkpoint, to the bit."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.errors import LayoutError
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.params import local_params
from rlhf.mcore.transfer import Placed, transfer_layouts, transfer_weights
from rlhf.reshard.topology import Topology
from tests.harness.ranks import run_ranks
from tests.mcore.stand_in import tiny_spec
from tests.mcore.tiny import make_checkpoint

# checkpoint, source, destination, its head
CASES = (
    ("llama", ParallelConfig(tp=2, pp=2), ParallelConfig(tp=4), Head.VALUE),  # untied: the lm head is not sent
    ("llama", ParallelConfig(tp=4), ParallelConfig(pp=3, layers_per_stage=(1, 2, 1), first_rank=1), Head.LM),
    ("qwen2", ParallelConfig(pp=2), ParallelConfig(tp=2, first_rank=2), Head.LM),  # other ranks; tied
    ("qwen2", ParallelConfig(tp=2, first_rank=2), ParallelConfig(pp=2, dp=2), Head.LM),
    ("qwen2", ParallelConfig(), ParallelConfig(tp=2, first_rank=1), Head.VALUE),
    ("llama", ParallelConfig(pp=2, vpp=2), ParallelConfig(tp=2, first_rank=2), Head.VALUE),
    ("qwen2", ParallelConfig(tp=2), ParallelConfig(pp=2, vpp=2, first_rank=1), Head.LM),
    ("mixtral", ParallelConfig(tp=2, dp=2, ep=2), ParallelConfig(dp=2, etp=2, first_rank=1), Head.VALUE),
)


def placed(name: str, folder: Path, parallel: ParallelConfig, head: Head) -> Placed:
    return Placed(name=name, spec=read_spec(folder), parallel=parallel, head=head, dtype="float32")


def built(one: Placed, factory: GroupFactory, *, trainable: bool) -> MegatronModel | None:
    groups = make_groups(one.parallel, factory)
    if not groups.is_member:
        return None
    model = build_model(
        one.spec,
        ModelConfig(path="-"),
        one.parallel,
        groups,
        head=one.head,
        device=torch.device("cpu"),
        seed=11,
        trainable=trainable,
    )
    for param in local_params(model).values():
        param.fill_(torch.nan)
    return model


def check_ranks(root: Path) -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for case, source, destination, head in CASES:
        folder = root / case
        src, dst = placed("actor", folder, source, Head.LM), placed("critic", folder, destination, head)
        actor, model, read = (
            built(one, factory, trainable=trains) for one, trains in ((src, True), (dst, True), (dst, False))
        )
        group = factory.device_group([tuple(sorted({*source.ranks, *destination.ranks}))])
        for one in (actor, read):
            if one is not None:
                load_weights(one, folder)
        if group is not None:
            certificate = transfer_weights(
                transfer_layouts(src, dst),
                actor,
                model,
                topology=Topology.blocks(4, ranks_per_node=2),
                group=group,
                device=torch.device("cpu"),
                bucket_bytes=10_000,
            )
            assert certificate.ratio == 1.0
        if model is not None:
            wanted = local_params(read)
            for name, param in local_params(model).items():
                assert torch.equal(param, wanted[name]), f"{case} {source} -> {destination}: {name}"
        dist.barrier()


@pytest.mark.dist
def test_a_model_started_from_another_equals_one_that_read_the_checkpoint(tmp_path: Path) -> None:
    for case in ("llama", "qwen2", "mixtral"):
        make_checkpoint(case, tmp_path / case)
    run_ranks(4, check_ranks, tmp_path)


def test_another_model_is_refused_by_name() -> None:
    def side(name: str, head: Head, **changes: object) -> Placed:
        return Placed(name=name, spec=tiny_spec(**changes), parallel=ParallelConfig(), head=head, dtype="float32")

    with pytest.raises(LayoutError, match=r"^critic\.model\.init: model\.layers\.0\.mlp\.gate_proj\.weight has shape"):
        transfer_layouts(side("actor", Head.LM), side("critic", Head.VALUE, ffn_size=48))
    with pytest.raises(LayoutError, match=r"^reference\.model\.init: the actor has no lm_head\.weight"):
        transfer_layouts(side("actor", Head.LM, tied_embeddings=True), side("reference", Head.LM))
    with pytest.raises(LayoutError, match=r"model\.layers\.4\.input_layernorm\.weight of the actor has no place"):
        transfer_layouts(side("actor", Head.LM, num_layers=5), side("reference", Head.LM))
    source, destination = transfer_layouts(side("actor", Head.LM), side("critic", Head.VALUE))
    assert source.tensors == destination.tensors
    assert not {"lm_head.weight", "score.weight"} & set(source.tensors)
