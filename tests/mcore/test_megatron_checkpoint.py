"""Megatron-Core loads what we write and we load what it writes: its own model then gives the same logits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.store.torch_dist import TorchDistReader, data_file_name, write_metadata
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.registry import hf_config
from rlhf.families.spec import Head, ModelSpec
from rlhf.families.writer import write_checkpoint
from rlhf.mcore.groups import ModelGroups
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import draw_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from rlhf.mcore.model_state import model_blocks, weights_loaded
from rlhf.mcore.params import local_params
from rlhf.mcore.stored import extra_state_keys, other_key, stored_pieces, stored_shapes
from rlhf.reshard.block import Block
from tests.checkpoint.stored_blocks import write_file
from tests.mcore.fake_ranks import as_rank
from tests.mcore.megatron_writer import APART, CASES
from tests.mcore.tiny import pack, sequences

ALONE = ParallelConfig()


def our_model(spec: ModelSpec, groups: ModelGroups, parallel: ParallelConfig = ALONE) -> MegatronModel:
    return build_model(
        spec,
        ModelConfig(path="-"),
        parallel,
        groups,
        head=Head.LM,
        device=torch.device("cpu"),
        seed=3,
        trainable=False,
    )


def logits(model: MegatronModel) -> Tensor:
    packed = pack(sequences(model.spec.vocab_size), multiple_of=1)
    with torch.no_grad():
        hidden = model.chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
    return (hidden[:, 0] @ head_weight(model).T)[:, : model.spec.vocab_size].detach()


def write_ours(spec: ModelSpec, folder: Path) -> None:
    """As four ranks would, of a layout that cuts everything, and with the logits of one that cuts nothing."""
    folder.mkdir(parents=True)
    parallel = ParallelConfig(tp=2, dp=2, ep=2 if spec.num_experts else 1)
    files = []
    for rank in parallel.ranks:
        with as_rank(parallel, rank) as groups:
            model = our_model(spec, groups, parallel)
            draw_weights(model)
            files.append(write_file(folder / data_file_name(rank), model_blocks(model, own_share=True)))
    write_metadata(folder, files, common={}, empty_objects=extra_state_keys(spec))
    with as_rank(ALONE, 0) as groups:
        model = our_model(spec, groups)
        draw_weights(model)
        torch.save(logits(model), folder / "logits")


def convert(spec: ModelSpec, folder: Path) -> None:
    """The same weights from a Hugging Face folder, by the command line."""
    with as_rank(ALONE, 0) as groups:
        model = our_model(spec, groups)
        draw_weights(model)
        params, layout = local_params(model), megatron_layout(spec, ALONE, head=Head.LM, dtype="float32")
        tensors = {name: torch.empty(shape) for name, shape in layout.tensors.items()}
        for one in layout.holdings(0):
            tensors[one.tensor][one.box.slices] = params[one.param][one.param_box(one.box).slices]
    write_checkpoint(folder / "hf", tensors, hf_config(spec))
    cut = ["--tp", "2", "--ep", "2"] if spec.num_experts else ["--tp", "2", "--pp", str(spec.num_layers)]
    assert main(["to-megatron", str(folder / "hf"), str(folder / "converted"), *cut]) == 0


def blocks_of(model: MegatronModel, *, layers_apart: bool) -> list[Block]:
    """What a model holds that nothing cuts, by way of the logical tensors."""
    spec, params = model.spec, local_params(model)
    shapes = stored_shapes(spec, head=Head.LM, layers_apart=layers_apart)
    held = megatron_layout(spec, ALONE, head=Head.LM, dtype="float32").holdings(0)
    blocks = []
    for one, piece in zip(held, stored_pieces(spec, head=Head.LM, layers_apart=layers_apart), strict=True):
        assert (one.tensor, one.box) == (piece.tensor, piece.box)
        data = params[one.param][one.param_box(one.box).slices][(None,) * len(piece.lead)]
        blocks.append(Block(piece.key, shapes[piece.key], piece.stored_box(piece.box), data))
    return blocks


def logits_of_theirs(case: str, folder: Path) -> Tensor:
    """Ours, once their weights are read into it."""
    reader = TorchDistReader(folder)
    with as_rank(ALONE, 0) as groups:
        model = our_model(CASES[case], groups)
        blocks = blocks_of(model, layers_apart=True) if case in APART else model_blocks(model, own_share=False)
        wanted = []
        for block in blocks:
            key = block.key if block.key in reader.shapes else other_key(block.key)
            wanted.append(replace(block, key=key, shape=reader.shapes[key][0]))  # a padded vocabulary is larger
        reader.read(wanted)
        weights_loaded(model, None, with_masters=False)
        return logits(model)


def test_logits_are_equal_through_either_format(tmp_path: Path) -> None:
    for case, spec in CASES.items():
        write_ours(spec, tmp_path / case / "ours")
        convert(spec, tmp_path / case)
    command = [sys.executable, "-W", "ignore", "-m", "tests.mcore.megatron_writer", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    for case in CASES:
        found = torch.load(tmp_path / case / "logits.pt")
        ours = torch.load(tmp_path / case / "ours" / "logits")
        assert not torch.allclose(found["theirs"], found["ours"], atol=0.01), (
            "the same weights: the test proves nothing"
        )
        # fp32 through up to four layers; the head is applied by other code
        torch.testing.assert_close(found["ours"], ours, rtol=1e-5, atol=1e-6)
        assert torch.equal(found["converted"], found["ours"])
        torch.testing.assert_close(
            logits_of_theirs(case, tmp_path / case / "theirs"), found["theirs"], rtol=1e-5, atol=1e-6
        )
