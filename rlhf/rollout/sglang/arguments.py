"""Which server arguments the installed SGLang has, and what fits them, read from its files: to import it is slow."""

import ast
import importlib.util
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlhf.config.checks import one_of, refuse
from rlhf.config.nearest import unknown_key
from rlhf.config.sglang import SGLangConfig, argument_name, argument_value, is_taken

_GROUPS = Path("srt") / "arg_groups"
_FIELDS = _GROUPS / "field_order.py"
"""In SGLang's package: the names of all fields of its ServerArgs, as one tuple."""
_KINDS = _GROUPS / "fields"
"""Classes that declare them, with types and choices."""
_CHOICES = _GROUPS / "choices.py"
"""Lists of choices that these classes refer to by name."""
_ANY = "any"
_FITS: dict[type, set[str]] = {
    bool: {"bool"},
    int: {"int", "float"},
    float: {"float"},
    str: {"str"},
    list: {"List", "list", "set", "tuple"},
    dict: {"Dict", "dict"},
}
"""By the type of a value that YAML gives: names of types that take it."""
_OURS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Settings that are handed on as they are, unless they are auto."""
WHERE = "rollout.sglang.extra_args"


@dataclass(frozen=True, slots=True)
class Argument:
    """What SGLang's files say of a server argument."""

    kinds: frozenset[str]
    """Names of Python types, one of which a value must have."""
    choices: tuple[Any, ...]
    """Values that it may have; empty: any."""


def check_arguments(options: SGLangConfig) -> None:
    """Refuse settings that SGLang does not know, or would refuse once its processes have started."""
    check_names(options)
    known = known_kinds(options.python)
    for text in options.extra_args:
        argument = known.get(argument_name(text))
        with suppress(yaml.YAMLError):  # which the config refuses
            value = argument_value(text)
            if argument and value is not None:
                _check_value(text, value, argument)
    for name in _OURS:
        value = getattr(options, name)
        if value != "auto" and name in known and known[name].choices:
            one_of(f"rollout.sglang.{name}", value, ("auto", *known[name].choices))


def check_installed(options: SGLangConfig, *, where: str = "rollout.engine") -> None:
    """Refuse an engine on SGLang where the interpreter that it is to run in is not there, or has none."""
    if options.python:
        if shutil.which(options.python) is None:
            refuse(f"rollout.sglang.python: {options.python} is no program; needs an interpreter; change it")
    elif importlib.util.find_spec("sglang") is None:
        refuse(
            f"{where}: sglang given, but SGLang is not installed; needs it in this environment; run "
            "scripts/setup.sh core sglang (on a GPU: set rollout.sglang.python, see README.md)"
        )


def check_names(options: SGLangConfig) -> None:
    """Refuse those of `extra_args` that SGLang does not know, with the nearest it does; nothing where none is found."""
    known = known_arguments(options.python)
    for text in options.extra_args:
        name = argument_name(text)
        if known and name not in known:
            refuse(unknown_key(f"{WHERE}.{name}", [f"{WHERE}.{one}" for one in sorted(known) if is_taken(one)]))


def known_arguments(python: str = "") -> frozenset[str]:
    """Names of the arguments of SGLang in the environment of an interpreter (empty: this one); empty: none found."""
    return next((found for folder in _packages(python) if (found := _names_in(folder / _FIELDS))), frozenset())


def known_kinds(python: str = "") -> dict[str, Argument]:
    """The same with what is known of each; those whose declaration says nothing that can be checked are left out."""
    return next((found for folder in _packages(python) if (found := _kinds_in(folder))), {})


def _check_value(text: str, value: Any, argument: Argument) -> None:
    if argument.choices:
        if value not in argument.choices:
            words = ", ".join(map(str, argument.choices))
            refuse(f"{WHERE}: {text} given; SGLang needs one of {words}; change it")
    elif not (argument.kinds & _FITS.get(type(value), set())):
        refuse(
            f"{WHERE}: {text} given, which YAML reads as {type(value).__name__}; SGLang needs "
            f"{' or '.join(sorted(argument.kinds))}; change it"
        )


def _packages(python: str) -> Iterable[Path]:
    if not python:
        spec = importlib.util.find_spec("sglang")
        return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    program = shutil.which(python)
    return Path(program).parent.parent.glob("lib/python*/site-packages/sglang") if program else []


@cache
def _names_in(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    assigned = [node.value for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    names = (part.value for value in assigned for part in ast.walk(value) if isinstance(part, ast.Constant))
    return frozenset(name for name in names if isinstance(name, str))


@cache
def _kinds_in(package: Path) -> dict[str, Argument]:
    lists = _lists_in(package / _CHOICES)
    found = {}
    for path in sorted((package / _KINDS).glob("*.py")):
        for declared in ast.walk(ast.parse(path.read_text())):
            if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name):
                argument = _argument(declared.annotation, lists)
                if argument is not None:
                    found[declared.target.id] = argument
    return found


def _lists_in(path: Path) -> dict[str, tuple[Any, ...]]:
    """Lists of constants by name."""
    found = {}
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _constants(node.value)
    return found


def _argument(annotation: ast.expr, lists: dict[str, tuple[Any, ...]]) -> Argument | None:
    """Of `A[type, Arg(choices=..)]`, SGLang's short form of Annotated; None where it does not say what fits."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[declared, *more])):
            pass
        case _:
            return None
    told = {word.arg: word.value for call in more if isinstance(call, ast.Call) for word in call.keywords}
    kinds = frozenset(_kinds(declared))
    if "type_parser" in told or _ANY in kinds:
        return None
    choices = told.get("choices")
    named = lists.get(choices.id, ()) if isinstance(choices, ast.Name) else _constants(choices)
    return Argument(kinds, named or tuple(_literals(declared)))


def _kinds(declared: ast.expr) -> Iterator[str]:
    """Names of the types that a declaration admits; of a list, just that."""
    match declared:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _kinds(inner)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=several)):
            for one in several:
                yield from _kinds(one)
        case ast.Subscript(value=ast.Name(id="Literal")):
            yield "str"
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            yield name if any(name in names for names in _FITS.values()) else _ANY
        case _:
            yield _ANY


def _literals(declared: ast.expr) -> Iterator[Any]:
    for part in ast.walk(declared):
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == "Literal":
            yield from (one.value for one in ast.walk(part.slice) if isinstance(one, ast.Constant))


def _constants(node: ast.expr | None) -> tuple[Any, ...]:
    """Of a list or a tuple; empty where one of them is no constant."""
    if not isinstance(node, ast.List | ast.Tuple) or not all(isinstance(one, ast.Constant) for one in node.elts):
        return ()
    return tuple(one.value for one in node.elts if isinstance(one, ast.Constant))
