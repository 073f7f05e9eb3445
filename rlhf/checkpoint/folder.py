"""Checkpoints of a run side by side in one folder: names, `latest`, which are whole, which may go.

`step_00000010/` is a checkpoint; names that begin with a dot are saves under way or leftovers of one; one that ends in
`.left-...` belongs to a past that the run has left.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.checkpoint.manifest import MANIFEST_FILE, read_manifest
from rlhf.checkpoint.store.durable import flush_entries, replace_file
from rlhf.checkpoint.together import from_first, place
from rlhf.checkpoint.whole import find_damage
from rlhf.errors import CheckpointError, UnreadableError

LATEST_FILE = "latest"

_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"\.step_(\d{8,})\.partial-[0-9a-f]+")
_REPLACED = re.compile(r"\.(step_\d{8,})\.replaced-[0-9a-f]+")


def step_name(step: int) -> str:
    """Name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder; its name must be one."""
    found = _STEP.fullmatch(path.name)
    assert found is not None, f"{path} is no checkpoint of a step"
    return int(found[1])


def saved(folder: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, the one of the latest step first; [] where nothing is."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, there or not; None where the file is missing or says nonsense."""
    path = folder / LATEST_FILE
    name = path.read_text(errors="replace").strip() if path.is_file() else ""
    return folder / name if _STEP.fullmatch(name) else None


def newest_whole(
    folder: Path,
    *,
    group: ProcessGroup | None,
    note: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> Path | None:
    """The newest checkpoint all of whose files are as they were written; None when there is none.

    By the manifests alone: `latest` is written after a checkpoint has its name, and a kill may come between the two.

    Collective over `group` (gloo; None: this process alone), whose ranks read the files between them. A damaged
    checkpoint is left where it is.

    Args:
        folder: The run's folder of checkpoints; need not exist.
        group: All ranks that will load.
        note: Takes a line for each damaged checkpoint, on the group's first rank: which file, why, what is tried next.
        tick: Called for each piece that this rank has read: a slow disk is no hung rank.

    Raises:
        UnreadableError: One that may be whole could not be read; to take an older one would throw steps away. On all
            ranks.
    """
    leads = place(group)[0] == 0
    if leads:
        put_back(folder)
    order = from_first(saved(folder) if leads else [], group)
    for at, path in enumerate(order):
        damage = find_damage(path, group=group, tick=tick)
        if damage is None:
            return path
        if leads:
            then = f"trying {order[at + 1].name}" if at + 1 < len(order) else "there is no other"
            note(f"checkpoint {path} is damaged: {damage}; {then}")
    return None


def settle(folder: Path, step: int) -> list[Path]:
    """Make a whole checkpoint the newest, which a run is about to go on from. One process calls it.

    Those of later steps are not whole. They step aside under other names, so that one that can be read again some day
    is not taken for the future of what is done from here on; `latest` names the one of `step`.

    Returns:
        What stepped aside, by the new names.
    """
    left = []
    for path in saved(folder):
        if step_of(path) > step:
            left.append(path.rename(path.with_name(f"{path.name}.left-{os.urandom(4).hex()}")))
    found = latest(folder)
    if left or found is None or found.name != step_name(step):
        flush_entries(folder)
        replace_file(folder / LATEST_FILE, f"{step_name(step)}\n".encode())
    return left


def begin(folder: Path, step: int) -> Path:
    """A new hidden folder to save into. One process calls it.

    Its name is new each time, so that a process that an earlier job left behind cannot write into it.
    """
    path = folder / f".{step_name(step)}.partial-{os.urandom(4).hex()}"
    path.mkdir(parents=True)
    return path


def publish(partial: Path, final: Path) -> list[str]:
    """Give a finished save its name, in place of one of the same step, and let `latest` name it. One process calls it.

    Whenever it is cut, either the old or the new one is there whole (`put_back` finds it).

    Returns:
        What could not be done once the new one had its name, in words: it counts all the same.

    Raises:
        OSError: The new one has not got its name for good.
    """
    replaced = final.with_name(f".{final.name}.replaced-{os.urandom(4).hex()}")
    if final.exists():
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        put_back(final.parent)
        raise
    flush_entries(final.parent)
    undone = []
    try:
        replace_file(final.parent / LATEST_FILE, f"{final.name}\n".encode())
    except OSError as error:
        undone.append(f"{final.parent / LATEST_FILE} could not be made to name it: {error.strerror}")
    try:
        if replaced.exists():
            shutil.rmtree(replaced)
    except OSError as error:
        undone.append(f"{replaced}, which it replaces, could not be removed: {error.strerror}; remove it by hand")
    return undone


def put_back(folder: Path) -> None:
    """Undo a replacement that was cut in the middle. One process calls it, while nobody saves.

    Several may lie there of one step: what an earlier replacement could not remove, or not all of it. Then the one that
    has all its files, and of such the one whose save ended last, by its manifest.

    Raises:
        UnreadableError: Which of several it is cannot be told, for a manifest could not be read.
    """
    hidden: dict[str, list[Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _REPLACED.fullmatch(path.name)
        if found is not None and not (folder / found[1]).exists():
            hidden.setdefault(found[1], []).append(path)
    for name, paths in hidden.items():
        best = paths[0] if len(paths) == 1 else max(paths, key=lambda path: _age(path, step_of(Path(name))))
        best.rename(folder / name)


def _age(path: Path, step: int) -> tuple[bool, int]:
    """Greater for a better one: that of the step with all its files, then the younger."""
    try:
        manifest = read_manifest(path)
    except UnreadableError:
        raise
    except CheckpointError:
        return False, 0
    has_all = all(_size(path / name) == record.size for name, record in manifest.files.items())
    return has_all and manifest.step == step, (path / MANIFEST_FILE).stat().st_mtime_ns


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def sweep(folder: Path) -> None:
    """Remove what cut saves have left behind. One process calls it, while nobody saves."""
    put_back(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _PARTIAL.fullmatch(path.name) or _REPLACED.fullmatch(path.name):
            shutil.rmtree(path)
    (folder / f".{LATEST_FILE}.partial").unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; cut in the middle, what is left is hidden and swept up later."""
    hidden = path.with_name(f".{path.name}.partial-{os.urandom(4).hex()}")
    path.rename(hidden)
    shutil.rmtree(hidden)
