"""Whether a source of prompts is still the one that a run began with. Settings are compared by name, not here."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.config.data import DataConfig
from rlhf.errors import DataError

SAMPLED = 16
"""Problems of a generated task that stand for all: another version of the generator changes most of them."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a source holds, in a few bytes."""

    items: int
    """Bytes of the file, or problems looked at of a generated task."""
    content: str
    """Hash of them, in hexadecimal digits."""

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def fingerprint(config: DataConfig, *, seed: int) -> Fingerprint:
    """Of the source that `data` names. Reads the whole file, or draws the first problems of the run's task.

    Raises:
        DataError: The file cannot be read.
    """
    if config.source == "reasoning_gym":
        from rlhf.data.gym_problems import gym_row, training_stream  # noqa: PLC0415  # takes seconds to import

        stream, digest = training_stream(config, seed=seed, attempt=0), hashlib.blake2b(digest_size=16)
        looked_at = min(SAMPLED, config.task_size)
        for index in range(looked_at):
            row = gym_row(config, stream[index])
            digest.update(repr((row.prompt, row.answer)).encode())
        return Fingerprint(looked_at, digest.hexdigest())
    try:
        with Path(config.path).open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            return Fingerprint(file.tell(), content)
    except OSError as error:
        raise DataError(f"data.path: {config.path} cannot be read ({error}); needs a file; correct it") from error
