"""Opening a checkpoint that is to be converted: not before every file is known to be as it was written."""

from rlhf.checkpoint.convert.opening import open_weights
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.convert.ranks import Crew
from rlhf.checkpoint.convert.sources import Weights
from rlhf.checkpoint.manifest import MANIFEST_FILE
from rlhf.checkpoint.whole import require_whole
from rlhf.errors import CheckpointError


def refuse_needless(given: Given, *weights: Weights) -> None:
    """Refuse what was said about checkpoints that say it themselves.

    Raises:
        CheckpointError: An option means nothing for any of them.
    """
    for option, value in (("--role", given.role), ("--config-from", given.config_from)):
        if value and not any(option in one.told_by for one in weights):
            listed = " and ".join(f"{one.path} ({one.kind})" for one in weights)
            raise CheckpointError(f"{option} {value}: means nothing for {listed}; needs none; leave it out")


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
