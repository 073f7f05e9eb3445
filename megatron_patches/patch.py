"""Changes to Megatron-Core, each tied to the source it was written against.

Three kinds, from most to least intrusive: `Patch` puts another object in a target's place, `Edit` changes a few words
of a function and leaves the rest, `Shim` gives one module another value under one of its global names. Applying twice
is the same as applying once.
"""

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import CodeType, FunctionType, ModuleType
from typing import Protocol


class PatchError(RuntimeError):
    """What a patch wants to change is missing, or is no longer what the patch was written for."""


class Mend(Protocol):
    """One applied change."""

    @property
    def why(self) -> str:
        """The upstream fault."""

    @property
    def drop_when(self) -> str:
        """What makes the change superfluous."""

    def apply(self) -> None:
        """Put the change in place; a second call changes nothing."""


def source_sha(source: str) -> str:
    """First 12 hex digits of the sha256 of some source."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _import(target: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"{target}: module not found; drop the patch or mend target") from error


def _find(target: str) -> tuple[object, str, object]:
    """Owner, name and present value of "package.module:Class.method"."""
    module_name, _, path = target.partition(":")
    *owners, name = path.split(".")
    module = _import(target, module_name)
    try:
        owner = reduce(getattr, owners, module)
        return owner, name, owner.__dict__[name]
    except (AttributeError, KeyError) as error:
        raise PatchError(f"{target}: not found; drop the patch or mend target") from error


def _check(target: str, found: str, known: str, why: str) -> None:
    if found != known:
        raise PatchError(
            f"{target}: source is {found}, patch was written for {known}; "
            f"re-read it, then update or drop the patch. It exists because: {why}"
        )


def _function(value: object) -> FunctionType:
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """Puts a replacement in the place of one function or method."""

    target: str
    """ "package.module:Class.method"."""
    source_sha: str
    """Of the target's source, see `source_sha`."""
    replacement: Callable[..., object]
    why: str
    """The fault it mends."""
    drop_when: str
    """What upstream must ship for this file to be deleted."""

    def apply(self) -> None:
        """Put the replacement in place.

        Raises:
            PatchError: The target is missing or its source has changed.
        """
        owner, name, present = _find(self.target)
        if present is self.replacement:
            return
        _check(self.target, source_sha(inspect.getsource(_function(present))), self.source_sha, self.why)
        setattr(owner, name, self.replacement)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Changes words of one function in place, so that every module that imported it sees the change."""

    target: str
    """ "package.module:Class.method"; a plain function, class method or static method without closure."""
    source_sha: str
    """Of the target's source, see `source_sha`."""
    changes: tuple[tuple[str, str], ...]
    """(old, new) pieces of text; every occurrence of old is replaced, and there must be one."""
    why: str
    """The fault it mends."""
    drop_when: str
    """What upstream must ship for this file to be deleted."""

    def apply(self) -> None:
        """Compile the changed source and give its code to the function.

        Raises:
            PatchError: The target is missing, or its source has changed.
        """
        _, _, present = _find(self.target)
        function = _function(present)
        if function.__code__.co_filename == self._filename:
            return
        source = inspect.getsource(function)
        _check(self.target, source_sha(source), self.source_sha, self.why)
        function.__code__ = self._compile(textwrap.dedent(source), function)

    @property
    def _filename(self) -> str:
        return f"<edit of {self.target}>"

    def _compile(self, source: str, function: FunctionType) -> CodeType:
        for old, new in self.changes:
            if old not in source:
                raise PatchError(f"{self.target}: does not contain {old!r}; mend changes")
            source = source.replace(old, new)
        module = compile(source, self._filename, "exec")
        codes = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__]
        if len(codes) != 1 or codes[0].co_freevars != function.__code__.co_freevars:
            raise PatchError(f"{self.target}: is nested or has a closure; use Patch")
        return codes[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shim:
    """Gives one module another value under a global name. For builtins, which have no source to hash."""

    module: str
    name: str
    value: object
    mentions: str
    """Word of the module's source lines that the shim is about."""
    lines_sha: str
    """Of those lines, stripped, see `source_sha`; it tells that a line came, went or changed."""
    why: str
    """The fault it mends."""
    drop_when: str
    """What upstream must ship for this record to be deleted."""

    @property
    def target(self) -> str:
        """What is replaced, as package.module:name."""
        return f"{self.module}:{self.name}"

    @property
    def in_place(self) -> bool:
        """Whether the module has the value now."""
        return _find(self.target)[2] is self.value

    def lines(self) -> str:
        """The module's lines that mention the word."""
        source = inspect.getsource(_import(self.target, self.module))
        return "\n".join(line.strip() for line in source.splitlines() if self.mentions in line)

    def apply(self) -> None:
        """Put the value in place.

        Raises:
            PatchError: The module or the name is missing, or its lines about the word have changed.
        """
        owner, name, present = _find(self.target)
        if present is self.value:
            return
        _check(self.target, source_sha(self.lines()), self.lines_sha, self.why)
        setattr(owner, name, self.value)
