"""A Hugging Face folder as `Weights`: every tensor of it has a place in the model, or is known to be needless."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from rlhf.checkpoint.convert.sources import Place, Remark, Wanted, tied_remark
from rlhf.errors import CheckpointError
from rlhf.families.files import HfFolder
from rlhf.families.folder import INDEX_FILE
from rlhf.families.registry import head_of, logical_tensors, read_json, spec_of
from rlhf.families.spec import Head, LogicalTensor, ModelSpec, Part
from rlhf.reshard.layout import Box

READ_BYTES = 256 * 2**20
"""Of a tensor that is read to be compared, at a time."""

_BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""What older writers stored beside the weights and every reader computes anew."""

_HEAD_NAME = "lm_head.weight"


class HfWeights:
    """See `Weights`.

    Raises:
        CheckpointError: An unsupported architecture; a missing, misshapen or unknown tensor; a damaged file; a tied
            model with an lm head of its own.
    """

    kind = "Hugging Face folder"
    told_by: tuple[str, ...] = ()
    args_spec = None

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        self.path, self.hf_files = path, path
        self.spec: ModelSpec = spec_of(config, where=str(path / "config.json"))
        self.head = head_of(config, self.spec)
        self._folder = HfFolder(path)
        tensors = {tensor.name: tensor for tensor in logical_tensors(self.spec, head=self.head)}
        self._folder.check(tensors.values())
        self.dtypes: Mapping[str, torch.dtype] = {name: self._folder.dtype(name) for name in tensors}
        self.remarks = (*self._needless(tensors), *tied_remark(self.spec, self.head))

    def read(self, wanted: Iterable[Wanted]) -> None:
        """See `Weights`; memory is a few MiB."""
        for one in wanted:
            self._folder.read_into(one.tensor, one.box.slices, one.into)

    def _needless(self, tensors: Mapping[str, LogicalTensor]) -> list[Remark]:
        """Tensors of the folder that the model does not have, if each is known to be needless."""
        found, unknown = [], []
        for name, file in self._folder.unlisted().items():
            if not _BUFFERS.search(name):
                raise CheckpointError(
                    f"{self.path / file}: holds {name}, which {INDEX_FILE} does not place there; needs an index of all "
                    "tensors, since what it leaves out would be lost unsaid; fetch the index again"
                )
            found.append(Remark(Place.DROPPED, name, "a buffer that is computed from config.json"))
        for name in sorted(self._folder.names() - tensors.keys()):
            if _BUFFERS.search(name):
                found.append(Remark(Place.DROPPED, name, "a buffer that is computed from config.json"))
            elif name == _HEAD_NAME and self.head is Head.LM and self.spec.tied_embeddings:
                self._check_tied(next(tensor for tensor in tensors.values() if tensor.part is Part.EMBED))
                found.append(Remark(Place.DROPPED, name, "bit-equal to the embedding that it is tied to"))
            else:
                unknown.append(name)
        if unknown:
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise CheckpointError(
                f"{self.path}: {', '.join(unknown[:5])}{more}: no such tensor in a model of family {self.spec.family} "
                "with this config.json; needs the model's tensors alone, since what is unknown cannot be converted; "
                "check that config.json belongs to these weights"
            )
        return found

    def _check_tied(self, embedding: LogicalTensor) -> None:
        where = self._folder.file_of(_HEAD_NAME)
        shape, dtype = self._folder.shape(_HEAD_NAME), self._folder.dtype(_HEAD_NAME)
        is_equal = (shape, dtype) == (embedding.shape, self._folder.dtype(embedding.name))
        rows = max(1, READ_BYTES // (embedding.shape[1] * dtype.itemsize))
        for start in range(0, embedding.shape[0] if is_equal else 0, rows):
            box = Box.of((start, min(start + rows, shape[0])), (0, shape[1])).slices
            head, tied = self._folder.read(_HEAD_NAME, box), self._folder.read(embedding.name, box)
            is_equal = is_equal and torch.equal(head.view(torch.uint8), tied.view(torch.uint8))
        if not is_equal:
            raise CheckpointError(
                f"{where}: {_HEAD_NAME} differs from {embedding.name}, though config.json ties them; needs equal ones "
                "or tie_word_embeddings false; correct config.json if the head was trained on its own"
            )
