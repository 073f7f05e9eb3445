"""How a rule speaks: one door for faults, and small rules that many settings share, with one wording.

A rule calls `refuse(message)` or one of the functions below it. Outside of `collecting()` that raises ConfigError at
once; inside (the loader, the launcher's check, `--check`) the fault is noted and the next rules are asked too. So a
rule must not rely on an earlier one having ended the function: the shared rules return whether they hold.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from rlhf.errors import CheckpointError, ConfigError, DataError, LayoutError, RlhfError


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a run."""

    message: str
    """`key: what was found; what is needed; what to change`."""
    error: type[RlhfError] = ConfigError
    """What is raised when it is the only one."""

    @property
    def key(self) -> str:
        """The setting (or file) that the message begins with."""
        return self.message.partition(": ")[0]


class Faults:
    """Everything that was found wrong, in the order of finding.

    A rule that speaks of a setting whose value is known to be wrong says nothing new: its fault is left out.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []
        self._doubted: set[str] = set()

    def add(self, message: str, error: type[RlhfError] = ConfigError) -> None:
        """Note a fault that stands whatever else is wrong."""
        self.found.append(Fault(message, error))
        self.doubt(self.found[-1].key)

    def doubt(self, key: str) -> None:
        """Mark a setting whose value is not known, without a fault of its own."""
        self._doubted.add(key)

    def add_rule(self, message: str, error: type[RlhfError] = ConfigError) -> None:
        """Note a rule's fault, unless it speaks of a setting that is doubted."""
        if not any(_speaks_of(message, key) for key in self._doubted):
            self.add(message, error)

    def doubts(self, pattern: str) -> bool:
        """Whether the value of a setting that matches a regular expression is not known."""
        return any(re.fullmatch(pattern, key) for key in self._doubted)

    def raise_any(self, where: str) -> None:
        """Raise what was found: one fault as its own error, several in one ConfigError with a line each."""
        if len(self.found) == 1:
            raise self.found[0].error(self.found[0].message)
        if self.found:
            lines = [fault.message for fault in self.found]
            raise ConfigError("\n  ".join([f"{where}: {len(lines)} settings cannot work:", *lines]))


_COLLECTED: ContextVar[Faults | None] = ContextVar("faults that rules report to", default=None)


@contextmanager
def collecting(faults: Faults | None = None) -> Iterator[Faults]:
    """Rules asked inside note their faults here instead of raising."""
    faults = Faults() if faults is None else faults
    token = _COLLECTED.set(faults)
    try:
        yield faults
    finally:
        _COLLECTED.reset(token)


def refuse(message: str, error: type[RlhfError] = ConfigError) -> None:
    """Report that a rule does not hold: raise, or under `collecting()` note it and return.

    Raises:
        ConfigError: Or the error given; never under `collecting()`.
    """
    faults = _COLLECTED.get()
    if faults is None:
        raise error(message)
    faults.add_rule(message, error)


@contextmanager
def noted() -> Iterator[None]:
    """What functions that raise (readers of files, layouts) find wrong inside the block is reported by `refuse`."""
    try:
        yield
    except (ConfigError, CheckpointError, LayoutError, DataError) as error:
        if _COLLECTED.get() is None:
            raise
        refuse(str(error), type(error))


def at_least(where: str, value: float, low: float) -> bool:
    """Refuse unless value >= low."""
    if value >= low:
        return True
    refuse(f"{where}: {value} given; needs at least {low}; set {where}={low}")
    return False


def more_than(where: str, value: float, low: float) -> bool:
    """Refuse unless value > low."""
    if value > low:
        return True
    refuse(f"{where}: {value} given; needs more than {low}; raise it")
    return False


def between(where: str, value: float, low: float, high: float) -> bool:
    """Refuse unless low <= value <= high."""
    if low <= value <= high:
        return True
    refuse(f"{where}: {value} given; needs {low} to {high}; change it")
    return False


def one_of(where: str, value: str, allowed: tuple[str, ...]) -> bool:
    """Refuse unless value is one of the allowed words."""
    if value in allowed:
        return True
    refuse(f"{where}: {value!r} given; needs one of {', '.join(allowed)}; change it")
    return False


def folder_name(where: str, value: str) -> bool:
    """Refuse unless value can name one folder: no separators, no spaces at its ends, not hidden."""
    if value.strip() and value == value.strip() and not value.startswith(".") and not {"/", "\\", "\0"} & set(value):
        return True
    refuse(f"{where}: {value!r} given; needs the name of a folder, without slashes or a leading dot; change it")
    return False


def _speaks_of(message: str, key: str) -> bool:
    """Whether a message begins with a setting or names it further on (as `key = value` when the key is a bare word)."""
    end = r"(?!\w)" if "." in key else r"(:| ?=|\.\w)"
    return message.startswith(f"{key}:") or re.search(rf"(?<![\w.]){re.escape(key)}{end}", message) is not None
