"""Megatron-Core's own modules: we read the state dicts that they save, and they load what we write, strictly."""

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.made import made_weights
from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.rehearsal import rehearse
from rlhf.checkpoint.convert.sources import Wanted
from rlhf.checkpoint.convert.to_hf import to_hf
from rlhf.checkpoint.convert.to_legacy import to_legacy
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.reshard.layout import Box
from tests.checkpoint.megatron_lm import args_of, save_rank
from tests.harness.ranks import run_ranks
from tests.mcore.tiny import make_checkpoint

CASES = {
    "qwen2": ParallelConfig(tp=2, pp=2, vpp=2),  # tied
    "qwen3": ParallelConfig(tp=4),  # more ranks than KV heads
    "qwen3_moe": ParallelConfig(tp=2, dp=2, ep=4, etp=1),
    "mixtral": ParallelConfig(tp=2, pp=2, layers_per_stage=(1, 2), ep=2),
}
FILE = "model_optim_rng.pt"


def folder_of(groups: ModelGroups, parallel: ParallelConfig) -> str:
    """As Megatron-LM's `get_checkpoint_name` has it, from the process groups."""
    collection = groups.collection
    name = f"mp_rank_{collection.tp.rank():02d}"
    if parallel.pp > 1:
        name += f"_{collection.pp.rank():03d}"
    return name + (f"_{collection.ep.rank():03d}" if parallel.ep > 1 else "")


def check_reading(root: Path, case: str, model: MegatronModel) -> None:
    """The state dicts of all ranks, saved as they are."""
    parallel, groups, spec = model.parallel, model.groups, model.spec
    args = args_of(
        spec,
        tp=parallel.tp,
        pp=parallel.pp,
        vpp=parallel.vpp,
        num_experts=spec.num_experts or None,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    if groups.collection.dp.rank() == 0 or groups.collection.expt_dp.rank() == 0:
        path = root / f"{case}.saved" / "iter_0000070" / folder_of(groups, parallel) / FILE
        save_rank(path, args, [dict(module.state_dict_for_save_checkpoint()) for module in model.modules])
    dist.barrier()
    if dist.get_rank() == 0:
        weights = open_weights(Given(root / f"{case}.saved" / "iter_0000070", config_from=root / case))
        expected = load_file(root / case / "model.safetensors")
        assert weights.dtypes.keys() == expected.keys()
        for name, weight in expected.items():
            found = torch.empty_like(weight)
            weights.read([Wanted(name, Box(tuple((0, extent) for extent in weight.shape)), found)])
            assert torch.equal(found, weight), (case, name)


def check_writing(root: Path, case: str, model: MegatronModel) -> None:
    """Every key that a module wants is there, none is too many, and the parameters are those of our own loading."""
    path = root / f"{case}.ours" / "release" / folder_of(model.groups, model.parallel) / FILE
    content = torch.load(path, weights_only=False)  # as Megatron-LM does
    for number, module in enumerate(model.modules):
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(torch.nan)
        module.load_state_dict(content["model" if model.parallel.vpp == 1 else f"model{number}"], strict=True)
        for name, param in module.named_parameters():
            assert torch.equal(param, before[name]), (case, name)


def check_several_processes(root: Path, case: str, parallel: ParallelConfig) -> None:
    """Four processes write the files that one wrote, to the byte; a rehearsal of theirs leaves nothing."""
    crew, ours = Crew(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), root / f"{case}.ours"
    weights = open_weights(Given(root / case))
    to_legacy(weights, root / "four", crew, parallel=parallel, dtype="", overwrite=False, use_te=False)
    files = sorted(path.relative_to(ours) for path in ours.rglob(FILE))
    assert len(files) == 4
    mine = files[crew.rank]
    assert (root / "four" / mine).read_bytes() == (ours / mine).read_bytes()
    made = made_weights(root / case, dtype="")
    found = rehearse(
        made,
        root / "trial",
        crew,
        make=partial(to_hf, dtype="", shard_bytes=10**6, overwrite=False),
        convert=partial(to_legacy, parallel=parallel, dtype="", overwrite=False),
    )
    assert found.is_same
    assert not (root / ".trial.dummy").exists()


def check_rank(root: Path) -> None:
    torch.set_num_threads(1)
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for case, parallel in CASES.items():
        config = ModelConfig(path="by-hand", dtype="float32")
        model = build_model(
            read_spec(root / case),
            config,
            parallel,
            make_groups(parallel, factory),
            head=Head.LM,
            device=torch.device("cpu"),
            seed=1,
            trainable=False,
        )
        load_weights(model, root / case)
        check_reading(root, case, model)
        check_writing(root, case, model)
    check_several_processes(root, "qwen3_moe", CASES["qwen3_moe"])


@pytest.mark.dist
def test_megatron_loads_our_files_and_we_read_what_it_saves(tmp_path: Path) -> None:
    for case, parallel in CASES.items():
        make_checkpoint(case, tmp_path / case)
        sizes = [f"--{axis}={getattr(parallel, axis)}" for axis in ("tp", "pp", "vpp", "ep", "etp")]
        layers = [f"--layers-per-stage={','.join(map(str, parallel.layers_per_stage))}"]
        argv = ["to-megatron", str(tmp_path / case), str(tmp_path / f"{case}.ours"), "--format=legacy", "--names=local"]
        assert main([*argv, *sizes, *(layers if parallel.layers_per_stage else [])]) == 0
    run_ranks(4, check_rank, tmp_path)
