"""What keys a run has, read from the dataclasses: path, type, default, docstring."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

NO_VALUE = "???"  # OmegaConf's mark of a value that is still to be given
TYPE_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    path: str
    """Dotted path from the top of the file."""
    type_name: str
    """In words: text, whole number, number, true or false, list of ..., mapping."""
    default: object
    """Plain value; NO_VALUE when the key must be given."""
    doc: str
    """The field's docstring on one line."""

    @property
    def required(self) -> bool:
        """Whether the key has no default."""
        return self.default == NO_VALUE


@cache
def _docs_in_file(path: Path) -> dict[str, dict[str, str]]:
    """Docstring under each annotated field: class name -> field name -> text."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {})
        for line, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[line.target.id] = " ".join(after.value.value.split())
    return found


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of a dataclass's own fields, by name, read from its source; a field without one is left out."""
    return _docs_in_file(Path(inspect.getfile(cls))).get(cls.__name__, {})


@cache
def field_types(cls: type) -> dict[str, type]:
    """Types of a dataclass's fields, by name."""
    return get_type_hints(cls)


def type_name(kind: object) -> str:
    """A field's type in a user's words."""
    if is_dataclass(kind):
        return "section"
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}s"
    return next((name for known, name in TYPE_NAMES.items() if known in (kind, get_origin(kind))), str(kind))


def plain(value: object) -> object:
    """A setting's value as dicts, lists and scalars."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _default(field: Field, kind: type) -> object:
    if field.default is not MISSING:
        return plain(field.default)
    if field.default_factory is not MISSING:
        return plain(field.default_factory())
    return default_tree(kind) if is_dataclass(kind) else NO_VALUE


def default_tree(cls: type) -> dict[str, object]:
    """Defaults of a dataclass and all its sections as nested dicts; NO_VALUE where a key must be given."""
    kinds = field_types(cls)
    return {f.name: _default(f, kinds[f.name]) for f in fields(cls)}


def keys_of(cls: type) -> tuple[Key, ...]:
    """Every setting of a dataclass, those of its sections included, in the order of the source."""
    return tuple(_walk(cls, default_tree(cls), ""))


def _walk(cls: type, defaults: dict[str, object], prefix: str) -> Iterator[Key]:
    docs = field_docs(cls)
    for name, kind in field_types(cls).items():
        if is_dataclass(kind):
            below = defaults[name]
            assert isinstance(below, dict), f"{prefix}{name}: a section's default is a section"
            yield from _walk(kind, below, f"{prefix}{name}.")
        else:
            yield Key(f"{prefix}{name}", type_name(kind), defaults[name], docs.get(name, ""))
