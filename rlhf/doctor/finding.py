"""One thing that the doctor found."""

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    """It may work, slower or with a surprise."""
    ERROR = 2
    """A job would fail, or compute something else than asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at, what was seen, and what to do about it."""

    level: Level
    subject: str
    """versions, devices, network, memory, disk, limits, clock or nodes."""
    found: str
    """What was seen, with its values."""
    cure: str = ""
    """What to do; empty when all is well."""


def ok(subject: str, found: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, subject=subject, found=found)


def warning(subject: str, found: str, cure: str) -> Finding:
    """It may work."""
    return Finding(level=Level.WARNING, subject=subject, found=found, cure=cure)


def error(subject: str, found: str, cure: str) -> Finding:
    """It will not work."""
    return Finding(level=Level.ERROR, subject=subject, found=found, cure=cure)
