"""Whether prompts, as tokens, are still those that a run began with. Settings are compared by name, not here."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf.config.data import DataConfig
from rlhf.errors import DataError

SAMPLED = 16
"""Problems of a generated task that stand for all: another version of the generator changes most of them."""

UNUSED = ("version", "truncation", "padding")
"""Of tokenizer.json: what was asked for when it was last used, and nothing that we ask for."""

OTHER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
"""Of tokenizers that have no tokenizer.json."""


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


def tokenizer_hash(folder: Path, *, with_template: bool) -> str:
    """Hash of what turns text into tokens, in hexadecimal digits, however its files are laid out.

    Args:
        folder: A Hugging Face model folder.
        with_template: Whether prompts go through the chat template.
    """
    digest = hashlib.blake2b(digest_size=16)
    found = _read(folder / "tokenizer.json")
    for name in UNUSED:
        found.pop(name, None)
    digest.update(json.dumps(found, sort_keys=True).encode())
    for name in () if found else OTHER_FILES:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    if with_template:
        apart = folder / "chat_template.jinja"
        held = _read(folder / "tokenizer_config.json").get("chat_template")
        digest.update((apart.read_text(encoding="utf-8") if apart.is_file() else json.dumps(held)).encode())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """{} where nothing can be read: whoever loads the tokenizer says so."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
