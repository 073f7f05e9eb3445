"""The table printed when a job starts: which rank is where, and what it does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One rank."""

    rank: int
    host: str
    device: str
    roles: Mapping[str, Mapping[str, int]]
    """Coordinates in each role that the rank takes part in: {"actor": {"tp": 0, "pp": 1}}."""


def startup_table(rows: Sequence[RankRow], *, max_rows: int = 64) -> str:
    """Text table, one line a rank, one column a role; ranks in the middle of a larger job are left out and counted."""
    roles = list(dict.fromkeys(role for row in rows for role in row.roles))
    lines = [["rank", "host", "device", *roles]]
    half = max_rows // 2
    shown = rows if len(rows) <= max_rows else [*rows[:half], *rows[len(rows) - half :]]
    lines += [
        [str(row.rank), row.host, row.device, *(_coordinates(row.roles.get(role)) for role in roles)] for row in shown
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    if len(shown) < len(rows):
        text.insert(2 + half, f"... {len(rows) - len(shown)} more ranks")
    return "\n".join(text)


def _coordinates(at: Mapping[str, int] | None) -> str:
    if at is None:
        return "-"
    return " ".join(f"{axis}{index}" for axis, index in at.items()) or "yes"
