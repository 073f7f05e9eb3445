"""Megatron-LM's legacy checkpoints as `Weights`: the layout of our own Megatron models says what lies in which file."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf.checkpoint.convert.megatron_args import spec_of_args
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.places import TRACKER_FILE, tracked_name
from rlhf.checkpoint.convert.sources import Place, Remark, Wanted, tied_remark
from rlhf.checkpoint.legacy.layout import LegacyFiles, legacy_folders, ranks_of_folders
from rlhf.checkpoint.store.file_plan import contiguous_parts
from rlhf.errors import CheckpointError
from rlhf.families.raw_tensor import READ_BYTES, RawTensor
from rlhf.families.registry import head_of, logical_tensors, read_json, spec_of
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.mcore.layout import EMBEDDING, layers_before, megatron_layout, param_shapes
from rlhf.mcore.param_names import local_name
from rlhf.reshard.layout import Box, ParamLayout

_LISTED = 5


@dataclass(frozen=True, slots=True)
class _Held:
    """A block of a logical tensor in a file."""

    path: Path
    stored: RawTensor
    piece: ParamLayout


def find_legacy(path: Path) -> Path | None:
    """The folder of mp_rank folders that a path is or points to; None where it is of another kind.

    Raises:
        CheckpointError: It points to a checkpoint that is not there.
    """
    if legacy_folders(path):
        return path
    if (path / TRACKER_FILE).is_file() and legacy_folders(path / tracked_name(path)):
        return path / tracked_name(path)
    return None


class LegacyWeights:
    """See `Weights`.

    Raises:
        CheckpointError: A missing, misshapen or unknown tensor; a missing or damaged file, or one of an older version
            or that would run code; nothing says which model it is.
    """

    kind = "Megatron-LM legacy checkpoint"
    told_by: tuple[str, ...] = ("--config-from",)

    def __init__(self, path: Path, given: Given) -> None:
        """`path` as `find_legacy` gives it."""
        files = LegacyFiles(path)
        self.path, self.parallel, self.args = given.path, files.parallel, files.first.args
        self.args_spec, self.iteration = _args_spec(self.args), files.first.iteration
        self.spec, self.head, self.hf_files = self._model(given, path, files)
        tensors = logical_tensors(self.spec, head=self.head)
        held = self._held(files)
        self.files = tuple(file.path for file in files.read)
        self.num_blocks = sum(len(chunk) for file in files.read for chunk in file.chunks)
        self._replicas = {name: ones for name, ones in _by_replica(held).items() if len(ones) > 1}
        self._pieces = {name: ones[0] for name, ones in _by_replica(held).items()}
        self.dtypes: Mapping[str, torch.dtype] = {tensor.name: self._dtype(tensor.name) for tensor in tensors}
        self.remarks = (
            *self._padded(files, tensors),
            *tied_remark(self.spec, self.head),
            *(Remark(Place.REPLICATED, name, f"in {len(ones)} files") for name, ones in self._replicas.items()),
            *self._dropped(files),
        )

    def read(self, wanted: Iterable[Wanted]) -> None:
        """See `Weights`; memory is a few MiB. Copies of a tensor that several files hold are compared."""
        with _handles() as handle_of:
            for one in wanted:
                for piece in self._pieces[one.tensor]:
                    _read(piece, one, handle_of(piece.path))
                for copy in self._replicas.get(one.tensor, [])[1:]:
                    for piece in copy:
                        _compare(piece, one, handle_of(piece.path), self._pieces[one.tensor][0].path)

    def _model(self, given: Given, path: Path, files: LegacyFiles) -> tuple[ModelSpec, Head, Path | None]:
        """As the command line says, else the folder's config.json, else the args."""
        for folder in (given.config_from, path, path.parent):
            if folder is not None and (folder / "config.json").is_file():
                config = read_json(folder / "config.json")
                spec = spec_of(config, where=str(folder / "config.json"))
                return spec, head_of(config, spec), folder
        if given.config_from is not None:
            read_json(given.config_from / "config.json")  # says that it is missing
        return self.args_spec or spec_of_args(self.args, where=str(files.first.path)), Head.LM, None

    def _held(self, files: LegacyFiles) -> dict[str, list[list[_Held]]]:
        """For each logical tensor the blocks in each file that has some."""
        spec, parallel = replace(self.spec, vocab_size=self._padded_rows(files)), self.parallel
        layout = megatron_layout(spec, parallel, head=self.head, dtype="float32")
        found: dict[str, list[list[_Held]]] = {}
        for name, rank in sorted(ranks_of_folders(parallel, layout, where=str(files.folder)).items()):
            stage = rank // parallel.tp % parallel.pp
            file = files.of(name)
            shapes = param_shapes(spec, parallel, head=self.head, stage=stage)
            stored: dict[str, RawTensor] = {}
            for before, chunk in zip(layers_before(spec, parallel, stage), file.chunks, strict=True):
                stored |= {local_name(key, before): tensor for key, tensor in chunk.items()}
            _check(file.path, stored, shapes, self.spec)
            of_file: dict[str, list[_Held]] = {}
            for piece in layout.holdings(rank):
                of_file.setdefault(piece.tensor, []).append(_Held(file.path, stored[piece.param], piece))
            for tensor, pieces in of_file.items():
                found.setdefault(tensor, []).append(pieces)
        return found

    def _padded_rows(self, files: LegacyFiles) -> int:
        """Rows of the embedding over all tp ranks."""
        stored = files.first.chunks[0].get(EMBEDDING)
        rows = stored.shape[0] * self.parallel.tp if stored else 0
        if rows < self.spec.vocab_size:
            raise CheckpointError(
                f"{files.first.path}: {EMBEDDING} has {rows} rows over {self.parallel.tp} files; needs at least the "
                f"{self.spec.vocab_size} of the model's vocabulary; check that the config is its own"
            )
        return rows

    def _dtype(self, name: str) -> torch.dtype:
        kinds = {one.stored.dtype for copy in self._replicas.get(name, [self._pieces[name]]) for one in copy}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self.path}: {name} is {' and '.join(sorted(map(str, kinds)))} in different files; needs one dtype"
            )
        return kinds.pop()

    def _padded(self, files: LegacyFiles, tensors: Iterable[LogicalTensor]) -> Iterator[Remark]:
        rows = self._padded_rows(files)
        for tensor in tensors:
            if tensor.part in (Part.EMBED, Part.LM_HEAD) and rows > tensor.shape[0]:
                yield Remark(
                    Place.PADDED, tensor.name, f"{rows} rows are stored, {tensor.shape[0]} are the vocabulary's"
                )

    def _dropped(self, files: LegacyFiles) -> Iterator[Remark]:
        for name in sorted(set(files.first.dropped)):
            why = "scales of fp8, no weight" if name.endswith("_extra_state") else "state of training, no weight"
            yield Remark(Place.DROPPED, name, why)


def _args_spec(args: Mapping[str, object]) -> ModelSpec | None:
    try:
        return spec_of_args(args, where="args")
    except CheckpointError:
        return None  # of a model that another source describes


def _check(path: Path, stored: Mapping[str, RawTensor], shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
    """Every parameter of the rank is there in its shape, and nothing else."""
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(
                f"{path}: no tensor {name}; needs it for this model; check that the config is its own"
            )
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(stored[name].shape)}; needs {list(shape)} for this model in the "
                "layout of its args; check that the config is its own"
            )
    unknown = sorted(stored.keys() - shapes.keys())
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        raise CheckpointError(
            f"{path}: {', '.join(unknown[:_LISTED])}{more}: no such tensor in this model of family {spec.family}; "
            "needs the model's tensors alone, since what is unknown cannot be converted; check that the config is "
            "its own"
        )


def _by_replica(held: Mapping[str, list[list[_Held]]]) -> dict[str, list[list[_Held]]]:
    """For each tensor its whole copies: blocks of several files together where they share it, else a file's alone."""
    found = {}
    for tensor, of_files in held.items():
        copies: list[dict[Box, _Held]] = []
        for pieces in of_files:
            for one in pieces:
                copy = next((copy for copy in copies if one.piece.box not in copy), None)
                if copy is None:
                    copies.append(copy := {})
                copy[one.piece.box] = one
        found[tensor] = [list(copy.values()) for copy in copies]
    return found


@contextmanager
def _handles() -> Iterator[Callable[[Path], int]]:
    """Files opened when they are first asked for, and closed together."""
    opened: dict[Path, int] = {}

    def handle_of(path: Path) -> int:
        if path not in opened:
            try:
                opened[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}; needs the file that was there") from error
        return opened[path]

    try:
        yield handle_of
    finally:
        for handle in opened.values():
            os.close(handle)


def _read(held: _Held, wanted: Wanted, handle: int) -> None:
    common = held.piece.box.intersect(wanted.box)
    if common is not None:
        into = wanted.into[common.shift(tuple(-start for start, _ in wanted.box.spans)).slices]
        held.stored.read(handle, held.piece.param_box(common).slices, into, path=held.path)


def _compare(held: _Held, wanted: Wanted, handle: int, first: Path) -> None:
    """Raise CheckpointError unless a copy has what was read of the first."""
    common = held.piece.box.intersect(wanted.box)
    for part in contiguous_parts(common, READ_BYTES // held.stored.dtype.itemsize) if common else []:
        read = wanted.into[part.shift(tuple(-start for start, _ in wanted.box.spans)).slices]
        copy = torch.empty_like(read)
        held.stored.read(handle, held.piece.param_box(part).slices, copy, path=held.path)
        if not torch.equal(copy.contiguous().view(torch.uint8), read.contiguous().view(torch.uint8)):
            raise CheckpointError(
                f"{held.path}: {wanted.tensor} differs from that in {first}; needs the same in both, which replicas "
                "of a model that trains as it should have; take another checkpoint"
            )
