"""Blocks of tensors in Megatron-Core's torch_dist format, written and read without a process group.

A folder of data files of items (`__R_0.distcp`), `.metadata` that says which box of which tensor each item is,
`common.pt` and `metadata.json`. Megatron-Core's `dist_checkpointing.load` and torch.distributed.checkpoint read what is
written here, and what they write is read here.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import torch

from rlhf.checkpoint.store.box_index import BoxIndex
from rlhf.checkpoint.store.coverage import check_cover
from rlhf.checkpoint.store.data_file import WrittenFile
from rlhf.checkpoint.store.durable import write_file_whole
from rlhf.checkpoint.store.file_plan import StoredItem
from rlhf.checkpoint.store.item_reader import STRETCH_BYTES, ItemReader, Wanted
from rlhf.checkpoint.store.stored_metadata import METADATA_FILE, metadata_bytes, read_metadata
from rlhf.errors import CheckpointError
from rlhf.reshard.block import Block

COMMON_FILE = "common.pt"
"""What Megatron-Core keeps that is not sharded: a dict of plain values."""

BACKEND_FILE = "metadata.json"
"""By which Megatron-Core knows a folder as its own."""

EMPTY_FILE = "__empty.distcp"
"""The one item that all objects without content share."""

OPTIMIZER_STATE = "optimizer.state."
"""In the key of what an optimizer keeps of weights: none of frozen ones, which may be a part of a stored tensor."""

RESERVED = frozenset({COMMON_FILE, BACKEND_FILE, METADATA_FILE})
"""Names that no other file of a folder may have."""


def data_file_name(number: int) -> str:
    """Name of the data file of the rank with this number."""
    return f"__{number}_0.distcp"


def write_metadata(
    folder: Path, written: Sequence[WrittenFile], *, common: Mapping[str, object], empty_objects: Sequence[str] = ()
) -> tuple[WrittenFile, ...]:
    """Write and flush what makes a folder of data files a torch_dist checkpoint, once all of them are written.

    Local: one process calls it.

    Args:
        folder: The checkpoint's folder.
        written: Data files of all ranks (files without items do no harm).
        common: What `dist_checkpointing.load_common_state_dict` gives: plain values by name.
        empty_objects: Keys of objects without content that Megatron looks for, `rlhf.mcore.stored.extra_state_keys`.

    Returns:
        The files it wrote.

    Raises:
        CheckpointError: A tensor is not covered exactly once (an optimizer's state: at most once), or two ranks see it
            with different shapes or dtypes.
        OSError: A file exists or cannot be written.
    """
    items = [(file.name, item) for file in written for item in file.items]
    tensors: dict[str, list[StoredItem]] = {}
    for _, item in items:
        tensors.setdefault(item.key, []).append(item)
    for key, ones in tensors.items():
        kinds = {(one.shape, one.dtype) for one in ones}
        if len(kinds) > 1:
            listed = " and ".join(f"{list(shape)} of {dtype}" for shape, dtype in sorted(kinds, key=str))
            raise CheckpointError(f"{folder}: {key} is {listed}; needs one shape and dtype on all ranks")
        wholly = OPTIMIZER_STATE not in key
        check_cover(str(folder), key, ones[0].shape, [one.box for one in ones], wholly=wholly)
    empty = [write_file_whole(folder, EMPTY_FILE, _saved([None]))] if empty_objects else []
    objects = {key: (file.name, file.size) for file in empty for key in empty_objects}
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    return (
        *empty,
        write_file_whole(folder, COMMON_FILE, _saved(dict(common))),
        write_file_whole(folder, METADATA_FILE, metadata_bytes(items, objects)),
        write_file_whole(folder, BACKEND_FILE, json.dumps(backend).encode()),
    )


def _saved(value: object) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class TorchDistReader:
    """Tensors of a torch_dist folder, whoever wrote it, read block by block.

    Local: any process may read anything. Files are not checked against checksums here.
    """

    def __init__(self, folder: Path) -> None:
        """Read `.metadata`.

        Raises:
            CheckpointError: The folder holds no readable `.metadata`.
        """
        self.folder = folder
        self._places = read_metadata(folder)
        self._indices: dict[str, BoxIndex] = {}
        self.shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (items.shape, items.dtype) for key, items in self._places.items() if items
        }
        """Shape and dtype of each stored tensor."""

    def read(self, blocks: Iterable[Block], *, cast: bool = False, tick: Callable[[], None] = lambda: None) -> None:
        """Fill the blocks' data; each stored item is read at most once, and only where it is wanted.

        Args:
            blocks: What is wanted; boxes may overlap and repeat. Data may lie on any device with any strides.
            cast: Convert elements to the data's dtype. Otherwise another dtype is an error.
            tick: Called for each item that was read.

        Raises:
            CheckpointError: A tensor is missing, has another shape or dtype, is not stored whole, or a file is damaged;
                names the tensor. Blocks may have been filled in part then.
        """
        wanted: dict[str, dict[int, tuple[StoredItem, list[Wanted]]]] = {}
        any_on_gpu = False
        for block in blocks:
            self._check(block, cast=cast)
            any_on_gpu |= block.data.is_cuda
            found = 0
            for number, common in self._index(block.key).overlapping(block.box):
                name, item = self._places[block.key][number]
                wanted.setdefault(name, {}).setdefault(item.start, (item, []))[1].append(Wanted(block, common))
                found += common.num_elements
            if found != block.box.num_elements:
                raise CheckpointError(
                    f"{self.folder}: {found} elements of {block.key} {block.box.spans} are stored; needs each of "
                    f"{block.box.num_elements} once; the checkpoint is not whole"
                )
        room = torch.empty(STRETCH_BYTES, dtype=torch.uint8, pin_memory=any_on_gpu)
        for name in sorted(wanted):
            with torch.no_grad(), ItemReader(self.folder / name, room) as file:
                for _, (item, takers) in sorted(wanted[name].items()):
                    file.read(item, takers)
                    tick()

    def _index(self, key: str) -> BoxIndex:
        if key not in self._indices:
            self._indices[key] = BoxIndex(self._places[key].spans())
        return self._indices[key]

    def _check(self, block: Block, *, cast: bool) -> None:
        if block.key not in self.shapes:
            raise CheckpointError(
                f"{self.folder}: no tensor {block.key}; needs one {list(block.shape)}; it holds {self._some_keys()}"
            )
        shape, dtype = self.shapes[block.key]
        if shape != block.shape:
            raise CheckpointError(
                f"{self.folder}: {block.key} is {list(shape)}; needs {list(block.shape)}; it holds another model"
            )
        if dtype != block.data.dtype and not cast:
            raise CheckpointError(
                f"{self.folder}: {block.key} is stored as {dtype}; needs {block.data.dtype}; load it with that dtype"
            )
        assert tuple(block.data.shape) == block.box.shape, f"{block.key}: data {block.data.shape} for {block.box.spans}"

    def _some_keys(self) -> str:
        keys = sorted(self.shapes)
        return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
