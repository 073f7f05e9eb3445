"""A model's weights straight from a torch_dist folder: a converted one as `model.path` needs no way back."""

from pathlib import Path

import torch
from torch import Tensor

from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.places import find_stored
from rlhf.checkpoint.convert.sources import Wanted
from rlhf.checkpoint.convert.stored import StoredWeights
from rlhf.errors import CheckpointError
from rlhf.families.spec import LogicalTensor, ModelSpec
from rlhf.mcore.load import take_weights
from rlhf.mcore.model import MegatronModel
from rlhf.reshard.layout import Box


def load_stored(model: MegatronModel, folder: Path) -> None:
    """Read this rank's slices into its parameters. On all ranks of the pool; no communication.

    A value head that the folder lacks is drawn from the model's seed. Peak memory above the parameters is the largest
    slice.

    Raises:
        CheckpointError: See `check_stored`; a file is cut short.
    """
    weights = check_stored(folder, model.spec)

    def slice_of(tensor: LogicalTensor, box: Box) -> Tensor:
        block = torch.empty(box.shape, dtype=weights.dtypes[tensor.name])
        weights.read([Wanted(tensor.name, box, block)])
        return block

    take_weights(model, slice_of, names=weights.dtypes.keys(), where=str(folder))


def check_stored(folder: Path, spec: ModelSpec) -> StoredWeights:
    """The weights in a converted folder of Megatron's format, if they are this model's. Reads headers.

    Raises:
        CheckpointError: No weights there in a format that models start from; another model; a tensor that is missing,
            unknown or misshapen.
    """
    place = find_stored(folder)
    if place is None:
        raise CheckpointError(
            f"{folder}: neither safetensors nor a distributed checkpoint; needs one of them; "
            "save the model again with safe_serialization=True, or convert it with `rlhf-convert to-hf`"
        )
    weights = StoredWeights(place, Given(folder))
    if weights.spec != spec:
        raise CheckpointError(
            f"{place.folder}: holds {weights.spec}; needs the model of {folder}/config.json, {spec}; correct model.path"
        )
    return weights
