"""Which folder `model.path` means, and whether its weights are all there, from names and headers. Imports no torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlhf.errors import CheckpointError, DamagedError
from rlhf.families.registry import read_json
from rlhf.families.spec import LogicalTensor, Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUICKSTART = ".cache/quickstart/"
"""Where the quickstart keeps the models that small configs begin from."""


def resolve_folder(path_or_hub_id: str, *, where: str = "model.path") -> Path:
    """The checkpoint folder that `model.path` means: a folder, or a hub id found in the local cache.

    Never uses the network.

    Args:
        path_or_hub_id: Value of the setting.
        where: The setting's name in a message.

    Raises:
        CheckpointError: There is neither such a folder nor such a cached model.
    """
    folder = find_folder(path_or_hub_id)
    if folder is None:
        cure = "correct the path, or download it with `hf download` first"
        if path_or_hub_id.startswith(QUICKSTART):
            cure = "run ./scripts/quickstart.sh, which makes it"
        raise CheckpointError(
            f"{where}: {path_or_hub_id!r} is neither a folder nor a hub id in the local cache; "
            f"needs a Hugging Face checkpoint folder; {cure}"
        )
    return folder


def find_folder(path_or_hub_id: str) -> Path | None:
    """As `resolve_folder`, but None where there is none."""
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_hub_id):
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # half a second that folders do not need
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

        try:
            return Path(snapshot_download(path_or_hub_id, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    return None


def weight_files(folder: Path) -> dict[str, str]:
    """The file in the folder that holds each tensor; empty for a single file, whose own header says what it holds.

    Raises:
        CheckpointError: There are no safetensors, or the index names a missing file.
    """
    if (folder / SINGLE_FILE).is_file():
        return {}
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; needs one of them; "
            "save the model again with safe_serialization=True"
        )
    return _read_index(folder)


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has weights as Hugging Face keeps them."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


def check_whole(folder: Path, tensors: Iterable[LogicalTensor]) -> None:
    """Raise CheckpointError unless the folder holds the tensors, each of its shape, in whole files.

    A value head may be missing. Reads headers: of every file, whether it is there and as long as its header says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(weight_files(folder).values())) or [SINGLE_FILE]:
        try:
            with safe_open(folder / file, framework="np") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 # not a dict
        except (SafetensorError, OSError) as error:
            raise damaged(folder / file, error) from error
    for tensor in tensors:
        if tensor.name in shapes:
            check_shape(folder, tensor, shapes[tensor.name])
        elif tensor.part is not Part.VALUE_HEAD:
            raise lacking(folder, tensor.name)


def check_shape(where: Path, tensor: LogicalTensor, found: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor in a file or folder has the shape that config.json implies."""
    if found != tensor.shape:
        raise CheckpointError(
            f"{where}: {tensor.name} has shape {found}; needs {tensor.shape}; "
            "check that config.json belongs to these weights"
        )


def lacking(folder: Path, name: str) -> CheckpointError:
    """What to say of a tensor that no file of the folder holds."""
    return CheckpointError(f"{folder}: no tensor {name}; needs it for this model; check that model.path is complete")


def damaged(path: Path, error: Exception) -> DamagedError:
    """What to say of a weight file that cannot be read."""
    return DamagedError(f"{path}: cannot be read ({error}); needs a whole safetensors file; fetch the file again")


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError(f"{path}: no weight_map; needs tensor -> file names; fetch the file again")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedError(f"{path}: its weight_map names no files; needs tensor -> file names; fetch the file again")
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            lost = next(name for name, of in weight_map.items() if of == file)
            raise DamagedError(
                f"{path}: names {file}, which is missing; needs it for {lost} and others; fetch the file again"
            )
    return dict(weight_map)
