"""What a whole checkpoint consists of: every file's size and checksum, and the checksum of every stored tensor.

Written last, so a folder without a readable one is not a checkpoint. The text is known by a sum of its own, and only
the exact text that `render` gives is accepted: a changed blank is a damaged file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoint.patience import GONE, patiently
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.errors import CheckpointError, UnreadableError
from rlhf.reshard.checksum import wrapped

MANIFEST_FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file as it was written."""

    size: int
    checksum: int
    """`rlhf.checkpoint.store.file_sum`, signed 64 bits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint as it was written."""

    step: int
    num_ranks: int
    """That wrote it."""
    files: Mapping[str, FileRecord]
    """By name relative to the folder; all but the manifest itself."""
    state: StateChecksum
    """Of the stored tensors."""

    def render(self) -> bytes:
        """The file's text."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "num_ranks": self.num_ranks,
            "state": {"bytes": self.state.num_bytes, "tensors": _hexed(self.state.sums)},
            "files": {name: [one.size, _hex(one.checksum)] for name, one in sorted(self.files.items())},
        }
        return (json.dumps({**body, "sum": _sum(body)}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CheckpointError: There is none, or its text is damaged.
        UnreadableError: It may be there and whole, but could not be read.
    """
    path = folder / MANIFEST_FILE
    try:
        text = patiently(path.read_bytes)
    except GONE as error:
        raise CheckpointError(f"{path}: {error.strerror}; needs the manifest that ends a save; it was cut") from error
    except OSError as error:
        raise UnreadableError(f"{path}: could not be read ({error.strerror}); needs to be; try again") from error
    damaged = CheckpointError(f"{path}: is not what was written; needs the text of a save; the file is damaged")
    try:
        found = json.loads(text)
        files = {name: FileRecord(size, _number(told)) for name, (size, told) in found["files"].items()}
        sums = {key: _number(told) for key, told in found["state"]["tensors"].items()}
        manifest = Manifest(found["step"], found["num_ranks"], files, StateChecksum(sums, found["state"]["bytes"]))
        is_ours = found["format"] == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged from error
    if not is_ours or manifest.render() != text:
        raise damaged
    return manifest


def _hexed(sums: Mapping[str, int]) -> dict[str, str]:
    return {key: _hex(number) for key, number in sorted(sums.items())}


def _hex(number: int) -> str:
    return f"{number % 2**64:016x}"


def _number(told: str) -> int:
    return wrapped(int(told, 16))


def _sum(body: Mapping[str, object]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=8).hexdigest()
