"""Whether the files of a checkpoint's folder are as they were written: by its manifest, or by what else tells sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.checkpoint.convert.places import StoredPlace
from rlhf.checkpoint.manifest import MANIFEST_FILE, read_manifest
from rlhf.checkpoint.whole import find_damage


@dataclass(frozen=True, kw_only=True, slots=True)
class Integrity:
    """Whether the files are as they were written."""

    state: str
    """whole, damaged, or unknown."""
    what: str
    """In words; names the damaged file."""


def integrity_of(place: StoredPlace, ends: Mapping[str, int], *, check: bool) -> Integrity:
    """Of a torch_dist folder, by its manifest or, without one, by the sizes of its files. Local.

    Args:
        place: The folder.
        ends: At least how many bytes each data file has, by `.metadata`.
        check: Whether files are read.
    """
    found = against_manifest(place.folder, check=check)
    if found is not None:
        return found
    for name, end in sorted(ends.items()):
        path = place.inner / name
        if not path.is_file():
            return Integrity(state="damaged", what=f"no {name}, which .metadata names")
        if path.stat().st_size < end:
            what = f"{name} ends at byte {path.stat().st_size}, and .metadata names bytes up to {end}"
            return Integrity(state="damaged", what=what)
    return Integrity(state="unknown", what=f"no {MANIFEST_FILE}, so no checksums; all files are there, none too short")


def against_manifest(folder: Path, *, check: bool) -> Integrity | None:
    """By a folder's manifest; None where there is none. Local; with `check` every file is read."""
    if not (folder / MANIFEST_FILE).is_file():
        return None
    if not check:
        return Integrity(state="unknown", what="not read, as asked for")
    damage = find_damage(folder, group=None)
    if damage is not None:
        return Integrity(state="damaged", what=damage)
    manifest = read_manifest(folder)
    tensors = f"; {manifest.state.render()}" if manifest.state.sums else ""
    return Integrity(state="whole", what=f"{len(manifest.files)} files as written{tensors}")


def damage_of(path: Path) -> str | None:
    """Of a folder with a manifest: what of it is missing or changed. Local; reads every file."""
    return find_damage(path, group=None) if (path / MANIFEST_FILE).is_file() else None
