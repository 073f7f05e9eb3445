"""Opening a checkpoint that is to be converted: not before every file is known to be as it was written."""

from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Weights, open_weights
from rlhf.checkpoint.manifest import MANIFEST_FILE
from rlhf.checkpoint.whole import require_whole


def open_whole(given: Given, crew: Crew, *, check: bool) -> Weights:
    """The weights of a checkpoint. Collective over the crew, whose processes read the files between them.

    Args:
        given: The checkpoint.
        crew: The processes.
        check: Whether files are summed first, where a manifest says what they are to sum to.

    Raises:
        CheckpointError: See `open_weights`; or a file is not as it was written.
    """
    weights = crew.together(lambda: open_weights(given))
    if check and (weights.path / MANIFEST_FILE).is_file():
        require_whole(weights.path, group=crew.group)
    return weights
