"""What to say about a key that no section has."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches


def unknown_key(path: str, valid: Sequence[str], elsewhere: Iterable[str] = ()) -> str:
    """Message for an unknown key: its full path, the nearest valid keys, and the cure.

    Args:
        path: Dotted path as given.
        valid: Dotted paths of every key and section of the chosen trainer.
        elsewhere: The same of the other trainers.
    """
    if path in elsewhere:
        return f"{path}: a key of another trainer; remove it, or change trainer"
    near = nearest(path, valid)
    if near:
        word, one = ("keys are", "one of them") if len(near) > 1 else ("key is", near[0])
        return f"{path}: unknown key; the nearest valid {word} {', '.join(near)}; use {one}, or remove it"
    section = _longest_section(path, valid)
    siblings = [p for p in valid if p.rpartition(".")[0] == section]
    where = f"section {section}" if section else "the top of the file"
    return (
        f"{path}: unknown key; {where} has {', '.join(p.rpartition('.')[2] for p in siblings)}; use one, or remove it"
    )


def nearest(path: str, valid: Sequence[str]) -> list[str]:
    """Up to three valid paths that look like the given one: misspelt in its section, else the same name elsewhere."""
    section, _, name = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in valid if p.rpartition(".")[0] == section}
    if close := get_close_matches(name, siblings, n=3, cutoff=0.6):
        return [siblings[match] for match in close]
    if same := [p for p in valid if p.rpartition(".")[2] == name]:
        return sorted(same, key=lambda p: -SequenceMatcher(None, path, p).ratio())[:3]
    return [] if siblings else get_close_matches(path, valid, n=3, cutoff=0.75)


def _longest_section(path: str, valid: Sequence[str]) -> str:
    section = path.rpartition(".")[0]
    while section and not any(p.startswith(f"{section}.") for p in valid):
        section = section.rpartition(".")[0]
    return section
