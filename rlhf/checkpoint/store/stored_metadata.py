"""`.metadata` of a torch_dist folder: which boxes of which tensors lie where; written and read with torch's classes.

The file is a pickle. It is read by an unpickler that makes torch's checkpoint metadata and plain values and nothing
else, so a file from elsewhere can run no code.
"""

import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf.checkpoint.store.box_index import Spans
from rlhf.checkpoint.store.file_plan import StoredItem
from rlhf.errors import CheckpointError, DamagedError
from rlhf.reshard.layout import Box

METADATA_FILE = ".metadata"

_TORCH_MODULES = {module.__name__: module for module in (metadata, filesystem, planner)}
_CLASSES = {
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_MEGATRON_CLASSES = {"MCoreMetadata": Metadata, "MCoreSavePlan": planner.SavePlan}
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PLACE = {"relative_path", "offset", "length"}
"""Of an item; a damaged file may name other fields."""
_OTHERS = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "Path"): lambda *parts: "/".join(parts),
}


def metadata_bytes(items: Sequence[tuple[str, StoredItem]], objects: Mapping[str, tuple[str, int]]) -> bytes:
    """The file for these (data file's name, item), and for objects that are a file each: (its name, its size) by key.

    Boxes of a tensor must cover it, each element once.
    """
    held = {key: BytesStorageMetadata() for key in objects}
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, filesystem._StorageInfo] = {}
    for name, item in items:
        offsets = torch.Size([start for start, _ in item.box.spans])
        if item.key not in tensors:
            properties = TensorProperties(dtype=item.dtype)
            tensors[item.key] = TensorStorageMetadata(properties, torch.Size(item.shape), [])
        chunks = tensors[item.key].chunks
        places[MetadataIndex(item.key, offsets, len(chunks))] = filesystem._StorageInfo(
            name, item.start, item.num_bytes
        )
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(item.box.shape)))
    for key, (name, size) in objects.items():
        places[MetadataIndex(key)] = filesystem._StorageInfo(name, 0, size)
    return pickle.dumps(
        Metadata(
            held | tensors, storage_data=places, storage_meta=StorageMeta(), version=filesystem.CURRENT_DCP_VERSION
        )
    )


class StoredItems(Sequence[tuple[str, StoredItem]]):
    """Where a tensor lies: (data file's name, item), each made when it is asked for.

    A rank of a large job wants few of them. Items raise CheckpointError when they lie nowhere, outside the folder, or
    were transformed, which we do not undo.
    """

    def __init__(self, path: Path, found: Metadata, key: str, tensor: TensorStorageMetadata) -> None:
        self._path, self._found, self._key, self._tensor = path, found, key, tensor
        self.shape: tuple[int, ...] = tuple(tensor.size)
        self.dtype = tensor.properties.dtype

    def __len__(self) -> int:
        return len(self._tensor.chunks)

    def spans(self) -> Spans:
        """Boxes of all items."""
        starts = np.array([chunk.offsets for chunk in self._tensor.chunks], dtype=np.int64)
        extents = np.array([chunk.sizes for chunk in self._tensor.chunks], dtype=np.int64)
        return np.stack([starts, starts + extents], axis=-1)

    @overload
    def __getitem__(self, at: int) -> tuple[str, StoredItem]: ...

    @overload
    def __getitem__(self, at: slice) -> list[tuple[str, StoredItem]]: ...

    def __getitem__(self, at: int | slice) -> tuple[str, StoredItem] | list[tuple[str, StoredItem]]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        path, key, chunk = self._path, self._key, self._tensor.chunks[at]
        place = self._found.storage_data.get(MetadataIndex(key, chunk.offsets))
        if not isinstance(place, filesystem._StorageInfo) or not vars(place).keys() >= _PLACE:
            raise DamagedError(f"{path}: block {at} of {key} lies nowhere; needs a place for each; the file is damaged")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{path}: {key} is stored through {place.transform_descriptors}; needs items as torch.save writes "
                "them; save without transforms"
            )
        name = Path(place.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(
                f"{path}: {key} lies in {name}; needs a file in the folder; the file was tampered with"
            )
        box = Box(tuple((low, low + extent) for low, extent in zip(chunk.offsets, chunk.sizes, strict=True)))
        return str(name), StoredItem(key, self.shape, self.dtype, box, place.offset, place.length)


def read_metadata(folder: Path) -> Mapping[str, StoredItems]:
    """By stored tensor: where it lies. What is not a tensor is left out.

    Raises:
        CheckpointError: The file is missing or damaged, or holds anything but checkpoint metadata.
    """
    path = folder / METADATA_FILE
    if not path.exists():
        raise CheckpointError(f"{folder}: no {METADATA_FILE}; needs a torch_dist checkpoint; give its folder")
    try:
        found = _Unpickler(BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, MemoryError) as error:
        raise DamagedError(
            f"{path}: cannot be read ({error}); needs checkpoint metadata; the file is damaged"
        ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise DamagedError(f"{path}: holds {type(found).__name__}; needs torch's checkpoint Metadata with its places")
    return {
        key: StoredItems(path, found, key, tensor)
        for key, tensor in found.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """The admitted class or function of this name.

        Raises:
            UnpicklingError: It is not admitted.
        """
        if module in _TORCH_MODULES and name in _CLASSES:
            return getattr(_TORCH_MODULES[module], name)
        if module == _MEGATRON and name in _MEGATRON_CLASSES:
            return _MEGATRON_CLASSES[name]
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        raise pickle.UnpicklingError(f"asks for {module}.{name}")
