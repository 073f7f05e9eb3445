"""Blocks written here and read by Megatron-Core and torch, and the other way round; what a reader refuses."""

import io
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from rlhf.checkpoint.store import item_reader
from rlhf.checkpoint.store.data_file import HostCopy, streamed, write_data_file
from rlhf.checkpoint.store.file_plan import plan_file
from rlhf.checkpoint.store.file_sum import sum_of_file
from rlhf.checkpoint.store.stored_metadata import metadata_bytes
from rlhf.checkpoint.store.torch_dist import TorchDistReader, data_file_name, write_metadata
from rlhf.errors import CheckpointError
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import checksums
from rlhf.reshard.layout import Box
from tests.checkpoint.stored_blocks import SHAPES, block, tensors, uneven_shares, wholes, write_file
from tests.harness.ranks import run_ranks

EMPTY = ("decoder.layers.linear._extra_state/shard_0_2", "decoder.layers.linear._extra_state/shard_1_2")


def write(folder: Path, *, item_bytes: int = 200) -> dict[str, torch.Tensor]:
    """A folder of two data files whose items are small, so that blocks are cut."""
    held = tensors()
    written = [
        write_file(folder / data_file_name(number), blocks, item_bytes=item_bytes)
        for number, blocks in enumerate(uneven_shares(held))
    ]
    write_metadata(folder, written, common={"iteration": 7, "args": {"lr": 0.5}}, empty_objects=EMPTY)
    return held


def sharded(held: dict[str, torch.Tensor], rank: int) -> dict[str, ShardedTensor | ShardedObject]:
    """Megatron's own description of halves: dim 1 of the stacked tensor, dim 0 of the others, the norm replicated."""
    found = {}
    for key, tensor in held.items():
        if key == "final_norm.weight":
            found[key] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
        elif key == "decoder.stacked.weight":
            half = tensor[:, 3 * rank : 3 * rank + 3].contiguous()
            found[key] = ShardedTensor.from_rank_offsets(key, half, (1, rank, 2))
        else:
            found[key] = ShardedTensor.from_rank_offsets(key, tensor.chunk(2)[rank].contiguous(), (0, rank, 2))
    return found


def exchange(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.cuda, "synchronize", lambda *_: None)  # Megatron's checkpoints ask for a GPU without need
        patches.setattr(torch.cuda, "current_device", lambda: "cpu")
        read_and_written(folder)
    for process in multiprocessing.active_children():  # that its writer keeps
        process.terminate()
        process.join()


def read_and_written(folder: Path) -> None:
    """On two ranks: Megatron-Core reads ours; both of its ways to save, and torch's, are written for us."""
    rank, held = dist.get_rank(), tensors()
    wanted = sharded({key: torch.zeros_like(tensor) for key, tensor in held.items()}, rank)
    wanted["extra"] = ShardedObject("decoder.layers.linear._extra_state", None, (2,), (rank,))
    loaded = dist_checkpointing.load(wanted, str(folder / "ours"))
    for key, expected in sharded(held, rank).items():
        assert torch.equal(loaded[key], expected.data), key
    assert loaded["extra"] is None
    assert loaded["iteration"] == 7
    for name, strategy in [
        ("plain", get_default_save_sharded_strategy()),
        ("parallel", FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())),
    ]:
        content = {**sharded(held, rank), "extra": ShardedObject("x._extra_state", torch.ones(3), (2,), (rank,))}
        dist_checkpointing.save({**content, "iteration": 3}, str(folder / name), strategy)
    torch_checkpoint.save({"layers": [held["embedding.weight"]], "step": 4}, checkpoint_id=folder / "torch")


@pytest.mark.dist
def test_megatron_core_and_torch_read_ours_and_we_read_theirs(tmp_path):
    for name in ("ours", "plain", "parallel"):
        (tmp_path / name).mkdir()
    held = write(tmp_path / "ours")
    assert dist_checkpointing.check_is_distributed_checkpoint(str(tmp_path / "ours"))
    common = dist_checkpointing.load_common_state_dict(str(tmp_path / "ours"))
    assert common == {"iteration": 7, "args": {"lr": 0.5}}
    run_ranks(2, exchange, tmp_path)
    for name in ("ours", "plain", "parallel"):
        reader = TorchDistReader(tmp_path / name)
        assert reader.shapes == {key: (SHAPES[key], held[key].dtype) for key in held}
        found = {key: torch.zeros_like(tensor) for key, tensor in held.items()}
        reader.read(uneven_shares(found)[0] + uneven_shares(found)[1])
        assert all(torch.equal(found[key], held[key]) for key in held), name
    reader = TorchDistReader(tmp_path / "torch")
    assert reader.shapes == {"layers.0": ((16, 7), torch.bfloat16)}
    found = torch.zeros(16, 7, dtype=torch.bfloat16)
    reader.read([Block("layers.0", (16, 7), Box.of((0, 16), (0, 7)), found)])
    assert torch.equal(found, held["embedding.weight"])
    theirs = {key: torch.zeros_like(tensor) for key, tensor in held.items()}
    torch_checkpoint.load(theirs, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(torch.equal(theirs[key], held[key]) for key in held)


def test_any_block_is_read_from_any_cut_through_small_and_large_stretches(tmp_path, monkeypatch):
    held = write(tmp_path)
    for stretch in (40, 1 << 20):
        monkeypatch.setattr(item_reader, "STRETCH_BYTES", stretch)
        for part in ((1, 3), (2, 6), (4, 9)), ((0, 4), (5, 6), (0, 10)), ((3, 4), (0, 1), (9, 10)):
            for whole in (torch.zeros(4, 6, 10), torch.zeros(10, 6, 4).permute(2, 1, 0)):
                found = block({"decoder.stacked.weight": whole}, "decoder.stacked.weight", *part)
                twice = Block(found.key, found.shape, found.box, torch.zeros(found.box.shape))
                TorchDistReader(tmp_path).read([found, twice])
                expected = held[found.key][found.box.slices]
                assert torch.equal(found.data, expected)
                assert torch.equal(twice.data, expected)
                assert whole.count_nonzero() == found.box.num_elements


def test_parameters_that_want_gradients_and_other_dtypes_are_filled(tmp_path):
    held = write(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(16, 7))
    blocks = [Block("embedding.weight", (16, 7), Box.of((0, 16), (0, 7)), weight)]
    with pytest.raises(CheckpointError, match=r"embedding\.weight is stored as torch\.bfloat16; needs torch\.float32"):
        TorchDistReader(tmp_path).read(blocks)
    TorchDistReader(tmp_path).read(blocks, cast=True)
    assert torch.equal(weight, held["embedding.weight"].float())


def test_no_byte_of_an_item_is_read_twice_and_unwanted_rows_are_not(tmp_path, monkeypatch):
    held = write(tmp_path, item_bytes=1 << 20)
    reads = []
    fill = item_reader.ItemReader._fill
    monkeypatch.setattr(
        item_reader.ItemReader,
        "_fill",
        lambda self, memory, start, item: (
            reads.append((self._path, start, len(memory))),
            fill(self, memory, start, item),
        ),
    )
    out = {key: torch.zeros_like(tensor) for key, tensor in held.items()}
    key = "embedding.weight"
    TorchDistReader(tmp_path).read(
        [block(out, key, (2, 4), (0, 7)), block(out, key, (3, 6), (1, 3)), *wholes(out)[2:3]]
    )
    assert sorted(size for _, _, size in reads) == [12 * 4, 4 * 7 * 2]  # rows 2 to 5 once, and the norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: Block("embedding.weights", *one), "no tensor embedding.weights"),
        (lambda one: Block("embedding.weight", (17, 7), *one[1:]), r"embedding.weight is \[16, 7\]; needs \[17, 7\]"),
    ],
)
def test_what_is_not_stored_is_named(tmp_path, change, message):
    write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        TorchDistReader(tmp_path).read([change(((16, 7), Box.of((0, 2), (0, 7)), torch.zeros(2, 7)))])


def test_a_file_that_is_cut_or_gone_is_named(tmp_path):
    held = write(tmp_path)
    data = tmp_path / data_file_name(1)
    data.write_bytes(data.read_bytes()[:-860])  # the last item ends with some 840 bytes of its archive
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: ends \d+ bytes too early for final_norm"):
        TorchDistReader(tmp_path).read(wholes(held))
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: No such file"):
        TorchDistReader(tmp_path).read(wholes(held))
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        TorchDistReader(tmp_path)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


def test_metadata_from_elsewhere_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(Evil()), pickle.dumps({"a": 1}), b"", b"\x80\x04nonsense"):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            TorchDistReader(tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("place", ["../elsewhere/__0_0.distcp", "/elsewhere/__0_0.distcp"])
def test_metadata_cannot_name_a_file_elsewhere(tmp_path, place):
    item = plan_file(wholes(tensors())).items[0]
    (tmp_path / ".metadata").write_bytes(metadata_bytes([(place, item)], {}))
    with pytest.raises(CheckpointError, match=r"needs a file in the folder; the file was tampered with"):
        TorchDistReader(tmp_path).read(wholes(tensors())[:1])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([((0, 8), (0, 7)), ((8, 15), (0, 7))], "7 of 112 elements of embedding.weight"),
        ([((0, 9), (0, 7)), ((8, 16), (0, 7))], "overlap"),
        ([((0, 16), (0, 7)), ((8, 9), (1, 2))], "overlap"),
        ([((0, 8), (0, 7)), ((0, 8), (0, 7))], "overlap"),  # as many elements as there are
    ],
)
def test_blocks_that_do_not_cover_a_tensor_once_are_refused(tmp_path, spans, message):
    held = tensors()
    blocks = [block(held, "embedding.weight", *one) for one in spans]
    written = [write_file(tmp_path / data_file_name(at), [one]) for at, one in enumerate(blocks)]
    with pytest.raises(CheckpointError, match=message):
        write_metadata(tmp_path, written, common={})


def test_an_item_is_the_file_that_torch_would_write(tmp_path):
    tensor = torch.arange(35, dtype=torch.bfloat16).reshape(5, 7)
    written = write_file(tmp_path / "file", [Block("x", (5, 7), Box.of((0, 5), (0, 7)), tensor)])
    stream = io.BytesIO()
    torch.save(tensor, stream)
    ours = (tmp_path / "file").read_bytes()
    assert (len(ours), written.size) == (len(stream.getvalue()), len(ours))
    different = [at for at, (a, b) in enumerate(zip(ours, stream.getvalue(), strict=True)) if a != b]
    assert len(different) <= 4 + 4 + 40  # the elements' CRC, twice, and an id that torch makes of the CRCs
    assert torch.equal(torch.load(io.BytesIO(ours), weights_only=True), tensor)
    assert sum_of_file(tmp_path / "file") == (written.size, written.checksum)


def test_elements_of_any_size_stand_next_to_each_other_in_any_windows(tmp_path):
    kinds = [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.int64, torch.bool]
    held = [(torch.arange(35) % 3 - 1).reshape(5, 7).to(kind) for kind in kinds]
    for number, window_bytes in enumerate((1, 9, 50, 300, 1000, 5000)):
        blocks = [Block(str(kind), (5, 7), Box.of((0, 5), (0, 7)), one) for kind, one in zip(kinds, held, strict=True)]
        plan = plan_file(blocks, item_bytes=40, window_bytes=window_bytes)
        kept = HostCopy()
        kept.take(plan, blocks)
        sums = []
        for way, memory in (("streamed", streamed(plan, blocks)), ("kept", kept.of)):
            folder = tmp_path / f"{way}{number}"
            folder.mkdir()
            written = write_data_file(folder, data_file_name(0), plan, memory)
            write_metadata(folder, [written], common={})
            found = [torch.zeros_like(one) for one in held]
            TorchDistReader(folder).read(
                [Block(one.key, one.shape, one.box, into) for one, into in zip(blocks, found, strict=True)]
            )
            assert all(torch.equal(one, into) for one, into in zip(held, found, strict=True))
            sums.append(written.sums)
        assert sums[0] == sums[1]
        assert sums[0] == {one.key: checksums([(one.key, one.box, one.data)])[0] for one in blocks}
