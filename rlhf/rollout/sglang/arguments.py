"""Which server arguments the installed SGLang has, read from its files: to import it takes seconds."""

import ast
import importlib.util
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlhf.config.checks import refuse
from rlhf.config.nearest import unknown_key
from rlhf.config.sglang import SGLangConfig, argument_name, is_taken

_FIELDS = Path("srt") / "arg_groups" / "field_order.py"
"""In SGLang's package: the names of all fields of its ServerArgs, as one tuple."""


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
            where = "rollout.sglang.extra_args"
            refuse(unknown_key(f"{where}.{name}", [f"{where}.{one}" for one in sorted(known) if is_taken(one)]))


def known_arguments(python: str = "") -> frozenset[str]:
    """Names of the arguments of SGLang in the environment of an interpreter (empty: this one); empty: none found."""
    return next((found for folder in _packages(python) if (found := _names_in(folder / _FIELDS))), frozenset())


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
