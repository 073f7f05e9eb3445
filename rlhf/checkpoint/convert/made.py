"""Weights that a generator makes when they are asked for: models of any size without a checkpoint of theirs.

An element depends on its tensor's place in the model and its own in the tensor alone, so any block can be made
anywhere, and tensors or rows that are swapped show. Blocks are cut out of a table of random numbers that fits into a
cache, so they are made faster than a disk could read them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from rlhf.checkpoint.convert.options import DTYPES
from rlhf.checkpoint.convert.sources import Wanted, tied_remark
from rlhf.errors import CheckpointError
from rlhf.families.folder import find_folder
from rlhf.families.published import PUBLISHED, find_published
from rlhf.families.registry import head_of, logical_tensors, read_json, spec_of
from rlhf.families.spec import Head, ModelSpec

_TURN, _STEP, _DRIFT, _APART = 1024, 977, 13, 7
"""Row r of tensor i begins at number _STEP * (r % _TURN) + _DRIFT * (r // _TURN) + _APART * i of the table."""


class MadeWeights:
    """See `Weights`; of a model that a folder's config.json or a published name describes."""

    args_spec = None
    told_by: tuple[str, ...] = ()

    def __init__(
        self, path: Path, spec: ModelSpec, *, head: Head, dtype: torch.dtype, kind: str, hf_files: Path | None
    ) -> None:
        self.path, self.spec, self.head, self.kind, self.hf_files = path, spec, head, kind, hf_files
        tensors = logical_tensors(spec, head=head)
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._begins = {tensor.name: _APART * place for place, tensor in enumerate(tensors)}
        self._dtype, self._table = dtype, torch.empty(0, dtype=dtype)
        self.dtypes: Mapping[str, torch.dtype] = dict.fromkeys(self._shapes, dtype)
        self.remarks = tied_remark(spec, head)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values()) * self._dtype.itemsize

    def read(self, wanted: Iterable[Wanted]) -> None:
        """See `Weights`; memory is the table's few MiB."""
        if not len(self._table):
            self._table = self._made_table()
        for one in wanted:
            spans = one.box.spans if len(one.box.spans) > 1 else ((0, 1), *one.box.spans)
            (first, stop), (left, right) = spans
            into = one.into if one.into.dim() > 1 else one.into[None]
            for turn in range(first // _TURN, -(-stop // _TURN)):
                low, high = max(first, turn * _TURN), min(stop, (turn + 1) * _TURN)
                at = self._begins[one.tensor] + (low - turn * _TURN) * _STEP + turn * _DRIFT + left
                rows = self._table.as_strided((high - low, right - left), (_STEP, 1), at)
                into[low - first : high - first].copy_(rows)

    def _made_table(self) -> torch.Tensor:
        shapes = [(1, *shape)[-2:] for shape in self._shapes.values()]
        most = max(columns + _DRIFT * (rows // _TURN) for rows, columns in shapes)
        generator = torch.Generator().manual_seed(20)
        numbers = torch.randn(_APART * len(shapes) + _TURN * _STEP + most, generator=generator)
        return numbers.mul_(self.spec.init_std).to(self._dtype)


def made_weights(path: Path, *, dtype: str) -> MadeWeights:
    """Weights of the model that `path` names: a folder with config.json, or a published model's name or hub id.

    Args:
        path: See above.
        dtype: Name of a dtype; empty takes the config's own, bfloat16 where it says none.

    Raises:
        CheckpointError: It names neither, or a model not supported.
    """
    folder = find_folder(str(path))
    if folder is not None and (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        spec = spec_of(config, where=str(folder / "config.json"))
        head, kind, files = head_of(config, spec), "config.json", folder
        said = str(config.get("dtype") or config.get("torch_dtype") or "")
    elif (known := find_published(str(path))) is not None:
        spec, head, kind, files, said = known.spec, Head.LM, f"published shapes of {known.hub_ids[0]}", None, ""
    else:
        raise CheckpointError(
            f"{path}: neither a folder with config.json nor a published model; needs a folder, a hub id, or "
            f"{', '.join(one.name for one in PUBLISHED)}; correct it"
        )
    name = dtype or (said if said in DTYPES else "bfloat16")
    return MadeWeights(path, spec, head=head, dtype=getattr(torch, name), kind=kind, hf_files=files)
