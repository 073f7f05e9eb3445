"""An optimizer's state may lack what belongs to frozen weights; weights lack nothing, and nothing is there twice."""

from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.store.torch_dist import TorchDistReader, data_file_name, write_metadata
from rlhf.errors import CheckpointError
from rlhf.reshard.block import Block
from rlhf.reshard.layout import Box
from tests.checkpoint.stored_blocks import write_file

WEIGHT = "actor.decoder.layers.mlp.linear_fc2.weight"
MOMENT = "actor.optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"


def layer(key: str, number: int) -> Block:
    return Block(key, (3, 2, 5), Box.of((number, number + 1), (0, 2), (0, 5)), torch.full((1, 2, 5), float(number)))


def written(folder: Path, *blocks: Block) -> TorchDistReader:
    folder.mkdir()
    write_metadata(folder, [write_file(folder / data_file_name(0), blocks)], common={}, empty_objects=["a/shard_0_1"])
    return TorchDistReader(folder)


def test_moments_of_some_layers_are_written_and_read(tmp_path: Path) -> None:
    reader = written(tmp_path / "some", layer(MOMENT, 0), layer(MOMENT, 2))
    assert set(reader.shapes) == {MOMENT}
    wanted = layer(MOMENT, 2)
    wanted.data.zero_()
    reader.read([wanted])
    assert (wanted.data == 2).all()
    with pytest.raises(CheckpointError, match=r"0 elements of .* are stored; needs each of 10 once"):
        reader.read([layer(MOMENT, 1)])


def test_weights_of_some_layers_and_moments_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"10 of 30 elements of actor.decoder.* are brought by no rank"):
        written(tmp_path / "weights", layer(WEIGHT, 0), layer(WEIGHT, 2))
    with pytest.raises(CheckpointError, match=r"of actor.optimizer.* overlap"):
        written(tmp_path / "twice", layer(MOMENT, 0), layer(MOMENT, 0))
