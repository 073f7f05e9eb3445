"""A role starts from a converted folder as from the folder that was converted."""

from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.convert.command import main
from rlhf.checkpoint.convert.load import check_stored, load_stored
from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.errors import CheckpointError
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import build_model
from rlhf.mcore.params import local_params
from tests.mcore.fake_ranks import as_rank


@pytest.mark.parametrize(
    ("case", "head", "parallel"),
    [
        ("qwen2", Head.LM, ParallelConfig(tp=2, pp=2)),
        ("qwen2", Head.VALUE, ParallelConfig(pp=2)),  # a value head that is drawn
        ("reward", Head.VALUE, ParallelConfig(tp=2)),
        ("mixtral", Head.LM, ParallelConfig(tp=2, dp=2, ep=2)),
    ],
)
def test_every_rank_gets_what_the_original_gives(
    case: str, head: Head, parallel: ParallelConfig, models: Path, tmp_path: Path
) -> None:
    assert main(["to-megatron", str(models / case), str(tmp_path / "there"), "--tp", "4"]) == 0
    spec = read_spec(tmp_path / "there")
    for rank in parallel.ranks:
        found = []
        for load, folder in ((load_weights, models / case), (load_stored, tmp_path / "there")):
            with as_rank(parallel, rank) as groups:
                config, cpu = ModelConfig(path=str(folder)), torch.device("cpu")
                model = build_model(spec, config, parallel, groups, head=head, device=cpu, seed=5, trainable=False)
                load(model, folder)
                found.append(local_params(model))
        expected, ours = found
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_what_no_model_can_start_from_is_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither safetensors nor a distributed checkpoint"):
        check_stored(tmp_path / "empty", read_spec(models / "llama"))
    assert main(["to-megatron", str(models / "llama"), str(tmp_path / "there")]) == 0
    with pytest.raises(CheckpointError, match=r"correct model\.path"):
        check_stored(tmp_path / "there", read_spec(models / "deep"))
