"""Which format a checkpoint's folder is in."""

from rlhf.checkpoint.convert.hf import HfWeights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.places import find_stored
from rlhf.checkpoint.convert.sources import Weights
from rlhf.checkpoint.convert.stored import StoredWeights
from rlhf.checkpoint.legacy.weights import LegacyWeights, find_legacy
from rlhf.errors import CheckpointError


def open_weights(given: Given) -> Weights:
    """The weights of a checkpoint in any format. Reads headers only; on every process that reads them.

    Raises:
        CheckpointError: No checkpoint there, or a format's own complaint.
    """
    path = given.path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; needs a checkpoint's folder; correct the path")
    place = find_stored(path)
    if place is not None:
        return StoredWeights(place, given)
    legacy = find_legacy(path)
    if legacy is not None:
        return LegacyWeights(legacy, given)
    return HfWeights(path)
