"""Folders with torch_dist files: where in them the files lie, and what tells which model it is."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import get_type_hints

import yaml

from rlhf.checkpoint.convert.megatron_args import read_args, spec_of_args
from rlhf.checkpoint.convert.options import Given
from rlhf.checkpoint.folder import LATEST_FILE
from rlhf.checkpoint.store.stored_metadata import METADATA_FILE
from rlhf.checkpoint.store.torch_dist import BACKEND_FILE, COMMON_FILE
from rlhf.errors import CheckpointError, DamagedError
from rlhf.families.folder import find_folder
from rlhf.families.registry import head_of, read_json, spec_of
from rlhf.families.spec import Head, ModelSpec, RopeScaling

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""By which Megatron-LM finds the newest checkpoint of a folder."""

RELEASE = "release"
"""What it says of weights that no training has touched; also their folder."""

RECORD_FILE = "conversion.json"
"""By which a folder is known as converted."""

CONVERTED = "Megatron torch_dist, converted"
TRAINING = "training checkpoint"
MEGATRON_LM = "Megatron-LM torch_dist"


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A checkpoint in torch_dist format."""

    folder: Path
    """What belongs to it: config, records, manifest."""
    inner: Path
    """The torch_dist files; the same folder or one in it."""
    kind: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What model a checkpoint holds."""

    spec: ModelSpec
    head: Head
    hf_files: Path | None
    """Folder with its config.json and tokenizer."""
    args_spec: ModelSpec | None
    """What Megatron-LM's args say, where they are and say enough."""


def find_stored(path: Path) -> StoredPlace | None:
    """The torch_dist checkpoint that a folder is or points to; None where it is of another kind.

    A run's folder and its `checkpoints/` mean the newest one; so does a folder of Megatron-LM's.

    Raises:
        CheckpointError: It points to a checkpoint that is not there.
    """
    if _is_stored(path):
        is_ours = (path / "driver.json").is_file() or (path / "roles").is_dir()
        if not is_ours and (path.parent / RECORD_FILE).is_file():
            return StoredPlace(path.parent, path, CONVERTED)
        return StoredPlace(path, path, TRAINING if is_ours else MEGATRON_LM)
    if (path / TRACKER_FILE).is_file():
        inner = path / tracked_name(path)
        if not inner.is_dir():
            raise DamagedError(
                f"{path / TRACKER_FILE}: names {inner.name}, which is missing; needs that folder; fetch it again"
            )
        if not _is_stored(inner):
            return None
        return StoredPlace(path, inner, CONVERTED if (path / RECORD_FILE).is_file() else MEGATRON_LM)
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST_FILE).is_file():
            newest = folder / (folder / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
            if not _is_stored(newest):
                raise CheckpointError(f"{folder / LATEST_FILE}: names {newest.name}, no checkpoint; give another")
            return StoredPlace(newest, newest, TRAINING)
    return None


def tracked_name(path: Path) -> str:
    """Name of the folder that Megatron-LM's tracker file in `path` means.

    Raises:
        CheckpointError: It says neither a number nor release.
    """
    text = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if text == RELEASE:
        return RELEASE
    if not text.isdecimal():
        raise CheckpointError(f"{path / TRACKER_FILE}: says {text!r}; needs a number of steps, or release; correct it")
    return f"iter_{int(text):07d}"


def _is_stored(path: Path) -> bool:
    return (path / METADATA_FILE).is_file() and (path / BACKEND_FILE).is_file()


def model_of(place: StoredPlace, given: Given, *, role: str) -> StoredModel:
    """Which model it is: as the command line says, else the folder's record of the role, its config.json or its args.

    Raises:
        CheckpointError: Nothing says it, or what does is no model known here.
    """
    args = read_args(place.inner / COMMON_FILE)
    args_spec = _args_spec(args, place)
    if given.config_from is not None:
        return _of_config(given.config_from, args_spec)
    record = place.folder / "roles" / f"{role}.json"
    if record.is_file():
        spec, head = _of_record(read_json(record), record)
        return StoredModel(spec, head, _trained_from(place.folder / "config.yaml", role), None)
    if (place.folder / "config.json").is_file():
        return _of_config(place.folder, args_spec)
    if args_spec is None:
        if args:
            spec_of_args(args, where=str(place.inner / COMMON_FILE))  # says what is missing
        raise CheckpointError(
            f"{place.folder}: nothing says which model it holds; needs config.json there, or the folder of its Hugging "
            "Face model; add --config-from HF"
        )
    return StoredModel(args_spec, Head.LM, None, args_spec)


def _of_config(folder: Path, args_spec: ModelSpec | None) -> StoredModel:
    config = read_json(folder / "config.json")
    spec = spec_of(config, where=str(folder / "config.json"))
    return StoredModel(spec, head_of(config, spec), folder, args_spec)


def _args_spec(args: Mapping[str, object], place: StoredPlace) -> ModelSpec | None:
    try:
        return spec_of_args(args, where=str(place.inner / COMMON_FILE)) if args else None
    except CheckpointError:
        return None  # of a model that another source describes


def _of_record(record: Mapping[str, object], path: Path) -> tuple[ModelSpec, Head]:
    """From the record of a role in a training checkpoint."""
    told = record.get("model")
    names = {field.name: field.default is MISSING for field in fields(ModelSpec)}
    if not isinstance(told, Mapping) or not {name for name, is_needed in names.items() if is_needed} <= told.keys():
        raise CheckpointError(f"{path}: does not say which model it is; needs what a save writes; take another one")
    numbers = {name: value for name, value in told.items() if name in names}
    for name, value in numbers.items():
        if not _is_of(value, _KINDS[name]):
            raise DamagedError(f"{path}: {name} is {value!r}; needs {_KINDS[name]}; the file is damaged")
    try:
        if isinstance(scaling := numbers.get("rope_scaling"), Mapping):
            numbers["rope_scaling"] = RopeScaling(**scaling)
        return ModelSpec(**numbers), Head(told.get("head"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; needs what a save writes; the file is damaged") from error


_KINDS = {name: getattr(kind, "__name__", str(kind)) for name, kind in get_type_hints(ModelSpec).items()}
"""Of each field of a spec."""


def _is_of(value: object, kind: str) -> bool:
    """Whether a value of a JSON file may be that of a field."""
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        return isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
    return kind != "str" or isinstance(value, str)


def _trained_from(config: Path, role: str) -> Path | None:
    """The folder that a run's model came from, if it is still there: it has tokenizer and config."""
    if not config.is_file():
        return None
    try:
        run = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{config}: no YAML; needs the config of the run; the file is damaged") from error
    for name in (role, "actor", "model"):
        section = run.get(name) if isinstance(run, dict) else None
        model = section.get("model", section) if isinstance(section, dict) else None
        path = model.get("path") if isinstance(model, dict) else None
        if isinstance(path, str):
            return find_folder(path)
    return None
