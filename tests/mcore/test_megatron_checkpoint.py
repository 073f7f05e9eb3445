"""Megatron-Core loads what we write and we load what it writes: its own model then gives the same logits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.torch_dist import TorchDistReader, data_file_name, write_file, write_metadata
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import ModelGroups
from rlhf.mcore.load import draw_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from rlhf.mcore.model_state import model_blocks, weights_loaded
from rlhf.mcore.stored import OTHER_KEYS, extra_state_keys
from tests.mcore.fake_ranks import as_rank
from tests.mcore.megatron_writer import CASES
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


def logits_of_theirs(spec: ModelSpec, folder: Path) -> Tensor:
    """Ours, once their weights are read into it."""
    reader = TorchDistReader(folder)
    with as_rank(ALONE, 0) as groups:
        model = our_model(spec, groups)
        blocks = []
        for block in model_blocks(model, own_share=False):
            key = block.key if block.key in reader.shapes else OTHER_KEYS[block.key]
            blocks.append(replace(block, key=key, shape=reader.shapes[key][0]))  # a padded vocabulary is larger
        reader.read(blocks)
        weights_loaded(model, None, with_masters=False)
        return logits(model)


def test_logits_are_equal_through_either_format(tmp_path: Path) -> None:
    for case, spec in CASES.items():
        write_ours(spec, tmp_path / case / "ours")
    command = [sys.executable, "-W", "ignore", "-m", "tests.mcore.megatron_writer", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    for case, spec in CASES.items():
        found = torch.load(tmp_path / case / "logits.pt")
        ours = torch.load(tmp_path / case / "ours" / "logits")
        assert not torch.allclose(found["theirs"], found["ours"], atol=0.01), (
            "the same weights: the test proves nothing"
        )
        # fp32 through up to four layers; the head is applied by other code
        torch.testing.assert_close(found["ours"], ours, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            logits_of_theirs(spec, tmp_path / case / "theirs"), found["theirs"], rtol=1e-5, atol=1e-6
        )
