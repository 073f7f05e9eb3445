"""A torch_dist folder as `Weights`: converted by us, saved by a training run of ours, or written by Megatron-LM."""

from collections.abc import Iterable, Mapping

import torch

from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.places import StoredPlace, model_of
from rlhf.checkpoint.convert.sources import Place, Remark, Wanted, tied_remark
from rlhf.checkpoint.store.torch_dist import TorchDistReader
from rlhf.errors import CheckpointError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head
from rlhf.mcore.stored import VOCABULARY_KEYS, StoredPiece, other_key, stored_pieces, stored_shapes
from rlhf.reshard.block import Block

_ANY_MODEL = "decoder.final_layernorm.weight"
"""A key that every model has."""

_FIRST_LAYER = "decoder.layers.0."
"""Begins keys of a model whose layers are stored each by itself."""

_BESIDE_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine", "opt_param_scheduler")
"""Beginnings of keys of Megatron-LM that are no weights."""

_UNTOLD = 3

OF_ANOTHER = "of another model"
"""Why a stored tensor is dropped that belongs to another role."""


def roles_in(keys: Iterable[str]) -> list[str]:
    """The models that a checkpoint with these keys holds, by what stands before them; "" for one without a name."""
    found = {key.removesuffix(_ANY_MODEL) for key in keys if key.endswith(_ANY_MODEL) and "optimizer." not in key}
    return sorted(prefix.removesuffix(".") for prefix in found)


class StoredWeights:
    """See `Weights`.

    Raises:
        CheckpointError: A missing, misshapen or unknown tensor; several models or none; a damaged file.
    """

    told_by: tuple[str, ...] = ("--role", "--config-from")

    def __init__(self, place: StoredPlace, given: Given) -> None:
        self.path, self.kind = place.folder, place.kind
        self._reader = TorchDistReader(place.inner)
        prefix = self._prefix(given.role)
        model = model_of(place, given, role=prefix.removesuffix("."))
        self.spec, self.head, self.hf_files, self.args_spec = model.spec, model.head, model.hf_files, model.args_spec
        apart = any(key.startswith(f"{prefix}{_FIRST_LAYER}") for key in self._reader.shapes)
        self._keys = self._stored_keys(prefix, layers_apart=apart)
        self._pieces: dict[str, list[StoredPiece]] = {}
        for piece in stored_pieces(self.spec, head=self.head, layers_apart=apart):
            self._pieces.setdefault(piece.tensor, []).append(piece)
        self.dtypes: Mapping[str, torch.dtype] = {
            name: self._reader.shapes[self._keys[pieces[0].key]][1] for name, pieces in self._pieces.items()
        }
        self.remarks = (*self._padded(), *self._dropped(prefix), *tied_remark(self.spec, self.head))

    def read(self, wanted: Iterable[Wanted]) -> None:
        """See `Weights`; memory is a few MiB, whatever is asked for."""
        self._reader.read([block for one in wanted for block in self._blocks(one)], cast=True)

    def _blocks(self, one: Wanted) -> Iterable[Block]:
        for piece in self._pieces[one.tensor]:
            common = piece.box.intersect(one.box)
            if common is not None:
                key = self._keys[piece.key]
                target = one.into[common.shift(tuple(-start for start, _ in one.box.spans)).slices]
                lead = (None,) * len(piece.lead)
                yield Block(key, self._reader.shapes[key][0], piece.stored_box(common), target[lead])

    def _prefix(self, role: str) -> str:
        """What stands before the keys of the model: `ROLE.`, or nothing."""
        found = roles_in(self._reader.shapes)
        listed = ", ".join(one or "one without a name" for one in found) or "none"
        if role and role not in found:
            raise CheckpointError(f"{self.path}: no model {role!r}; it holds {listed}; choose one with --role")
        if not role and len(found) != 1:
            raise CheckpointError(f"{self.path}: models: {listed}; needs one, or --role to say which; add --role")
        name = role or found[0]
        return f"{name}." if name else ""

    def _stored_keys(self, prefix: str, *, layers_apart: bool) -> dict[str, str]:
        """Key in the folder of each stored tensor of the model, whose shapes are checked."""
        keys, shapes = {}, self._reader.shapes
        for key, shape in stored_shapes(self.spec, head=self.head, layers_apart=layers_apart).items():
            there = next((prefix + one for one in (key, other_key(key)) if prefix + one in shapes), None)
            if there is None:
                raise CheckpointError(
                    f"{self.path}: no tensor {prefix}{key}; needs it for this model; check that the config is its own"
                )
            found = shapes[there][0]
            is_padded = key in VOCABULARY_KEYS and found[1:] == shape[1:] and found[0] >= shape[0]
            if found != shape and not (is_padded and not (self.head is Head.VALUE and shape[0] == 1)):
                raise CheckpointError(
                    f"{self.path}: {there} has shape {list(found)}; needs {list(shape)} for this model; "
                    "check that the config is its own"
                )
            keys[key] = there
        return keys

    def _padded(self) -> list[Remark]:
        found = []
        for tensor in logical_tensors(self.spec, head=self.head):
            key = self._pieces[tensor.name][0].key
            rows = self._reader.shapes[self._keys[key]][0][0]
            if key in VOCABULARY_KEYS and rows > tensor.shape[0]:
                why = f"{rows} rows are stored, {tensor.shape[0]} are the vocabulary's"
                found.append(Remark(Place.PADDED, tensor.name, why))
        return found

    def _dropped(self, prefix: str) -> list[Remark]:
        """Stored tensors that are no weights of this model."""
        found, unknown = [], []
        for key in sorted(self._reader.shapes.keys() - set(self._keys.values())):
            if not key.startswith(prefix):
                found.append(Remark(Place.DROPPED, key, OF_ANOTHER))
            elif key.removeprefix(prefix).startswith(_BESIDE_WEIGHTS):
                found.append(Remark(Place.DROPPED, key, "state of training, no weight"))
            else:
                unknown.append(key)
        if unknown:
            more = f" and {len(unknown) - _UNTOLD} more" if len(unknown) > _UNTOLD else ""
            raise CheckpointError(
                f"{self.path}: {', '.join(unknown[:_UNTOLD])}{more}: no such tensor in this model of family "
                f"{self.spec.family}; needs the model's tensors alone, since what is unknown cannot be converted; "
                "check that the config is its own"
            )
        return found
