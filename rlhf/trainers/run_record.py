"""What a checkpoint says of its run beside tensors, in `driver.json`: the loop's state, what a resume is checked by."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlhf.config.run import RunConfig
from rlhf.config.schema import plain
from rlhf.errors import CheckpointError
from rlhf.families.spec import ModelSpec

DRIVER_FILE = "driver.json"
FORMAT = 1
"""Of driver.json; another number is another meaning of its fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run as its checkpoints know it."""

    settings: Mapping[str, Any]
    """The resolved config, as nested dicts."""
    world_size: int
    """Ranks of the job."""
    data: Mapping[str, object]
    """Fingerprint of the prompts and of the tokenizer."""
    models: Mapping[str, Mapping[str, object]]
    """Spec of each trained role's model."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Checksum of the weights of each role that is not trained: they are in no checkpoint."""
    step: int = 0
    """Steps done."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Of the loop, as its to_dict gives it."""

    @staticmethod
    def of(
        config: RunConfig, *, world_size: int, data: Mapping[str, object], models: Mapping[str, ModelSpec]
    ) -> "RunRecord":
        """Before the first step."""
        settings = plain(config)
        assert isinstance(settings, dict), "a config is a section"
        specs = {role: _plain_spec(spec) for role, spec in models.items()}
        return RunRecord(settings=_as_json(settings), world_size=world_size, data=data, models=specs)

    def to_json(self) -> bytes:
        """driver.json; floats keep every bit."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @staticmethod
    def read(checkpoint: Path) -> "RunRecord":
        """Of a checkpoint's folder.

        Raises:
            CheckpointError: There is no driver.json that this version can read.
        """
        path = checkpoint / DRIVER_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); needs a checkpoint that a run has saved; take another one"
            ) from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise CheckpointError(
                f"{path}: of another version; needs format {FORMAT}; resume with the version it is of"
            )
        names = {one.name for one in fields(RunRecord)}
        if found.keys() != names:
            raise CheckpointError(f"{path}: holds {sorted(found)}; needs {sorted(names)}; take another checkpoint")
        return RunRecord(**found)


def _plain_spec(spec: ModelSpec) -> dict[str, object]:
    """Without what only new weights are drawn by."""
    return {name: value for name, value in _as_json(asdict(spec)).items() if name != "init_std"}


def _as_json(tree: dict[str, Any]) -> dict[str, Any]:
    """As a JSON file gives it back, so that what is saved and what is at hand compare equal."""
    found: dict[str, Any] = json.loads(json.dumps(tree))
    return found
