"""Writing a Hugging Face checkpoint folder: sharded safetensors whose mapped pages are the tensors. Whole or absent.

Several processes may fill shards of one folder on a shared file system: `begin` and `finish` are one process's, and the
callers see to it that all `fill`s lie between them. Knows no rank and no layout.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlhf.errors import CheckpointError
from rlhf.families.files import DTYPES
from rlhf.families.folder import INDEX_FILE, SINGLE_FILE
from rlhf.families.registry import read_json

DEFAULT_SHARD_BYTES = 4 * 2**30
"""Upper size of one file, as Hugging Face's own writer has it (5 GB), rounded down."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_COPIED = (
    "tokenizer*",
    "*.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
)
"""Files that make a checkpoint folder usable and that no training changes."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that no spec holds and a model needs to begin and end its text."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of the folder."""

    file: str
    tensors: tuple[str, ...]
    num_bytes: int


class HfWriter:
    """A checkpoint folder in the making; its shards are known before a byte is written.

    Raises:
        CheckpointError: The folder exists already and may not be replaced.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        if folder.exists() and not overwrite:
            raise CheckpointError(f"{folder}: exists; needs a new folder; choose another name or remove it")
        self.folder, self._shapes, self._dtype = folder, dict(shapes), dtype
        self._partial = folder.with_name(f".{folder.name}.partial")
        self.shards: tuple[Shard, ...] = _cut(self._shapes, dtype.itemsize, shard_bytes)

    def begin(self) -> None:
        """Make the hidden folder that the shards are written to; what an earlier try left there is removed."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    @contextmanager
    def fill(self, shard: Shard) -> Iterator[dict[str, Tensor]]:
        """The shard's tensors, backed by its file: what is in them when the block ends is on disk after it.

        Raises:
            OSError: The disk has no room for the shard (seen here, not later).
        """
        header = self._header(shard)
        size = len(header) + shard.num_bytes
        with (self._partial / shard.file).open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            file.flush()
            pages = mmap.mmap(file.fileno(), size)
            tensors, at = {}, len(header)
            for name in shard.tensors:
                count = prod(self._shapes[name])
                flat = torch.frombuffer(pages, dtype=self._dtype, count=count, offset=at)
                tensors[name] = flat.view(self._shapes[name])
                at += count * self._dtype.itemsize
            yield tensors
            pages.flush()
            os.fsync(file.fileno())

    def finish(self, config: Mapping[str, object], *, source_folder: Path | None = None) -> None:
        """Add index, config.json and the source folder's tokenizer and generation files; then show the folder.

        Token ids are taken from the source folder's config.json.
        """
        if source_folder is not None:
            source = read_json(source_folder / "config.json")
            config = {**config, **{key: source[key] for key in TOKEN_IDS if key in source}}
            for path in carried_files(source_folder):
                target = self._partial / path.relative_to(source_folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        if len(self.shards) > 1:
            weight_map = {name: shard.file for shard in self.shards for name in shard.tensors}
            total = sum(shard.num_bytes for shard in self.shards)
            _write_json(self._partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(self._partial / "config.json", config)
        replaced = self.folder.with_name(f".{self.folder.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.folder.exists():  # stepping aside takes no time; what is cut while it is removed has no name
            self.folder.rename(replaced)
        try:
            self._partial.rename(self.folder)
        except OSError:
            if replaced.exists():
                replaced.rename(self.folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Remove the hidden folder, after something went wrong."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _header(self, shard: Shard) -> bytes:
        """Length and JSON of a safetensors file, padded so that the data starts at a multiple of 8 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in shard.tensors:
            size = prod(self._shapes[name]) * self._dtype.itemsize
            shape = list(self._shapes[name])
            entries[name] = {"dtype": _DTYPE_NAMES[self._dtype], "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def carried_files(folder: Path) -> list[Path]:
    """Tokenizer, chat template and generation files of a checkpoint folder: what no training and no layout changes."""
    found = {path for pattern in _COPIED for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    *,
    source_folder: Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write whole tensors that one process holds, all of one dtype, as a checkpoint folder."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise CheckpointError(
            f"{folder}: tensors of dtypes {sorted(map(str, dtypes))}; needs one dtype; cast them first"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    writer = HfWriter(folder, shapes, dtype=dtypes.pop(), shard_bytes=shard_bytes, overwrite=overwrite)
    writer.begin()
    for shard in writer.shards:
        with writer.fill(shard) as pages:
            for name in shard.tensors:
                pages[name].copy_(tensors[name].detach())
    writer.finish(config, source_folder=source_folder)


def _cut(shapes: Mapping[str, tuple[int, ...]], item_bytes: int, shard_bytes: int) -> tuple[Shard, ...]:
    """Tensors in their order, in files of at most shard_bytes (a larger tensor has a file of its own)."""
    files: list[tuple[list[str], int]] = []
    for name, shape in shapes.items():
        size = prod(shape) * item_bytes
        if not files or files[-1][1] + size > shard_bytes:
            files.append(([], 0))
        names, filled = files[-1]
        files[-1] = ([*names, name], filled + size)
    if len(files) == 1:
        return (Shard(SINGLE_FILE, tuple(files[0][0]), files[0][1]),)
    return tuple(
        Shard(f"model-{number:05d}-of-{len(files):05d}.safetensors", tuple(names), size)
        for number, (names, size) in enumerate(files, start=1)
    )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
