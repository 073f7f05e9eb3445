"""Rows of a benchmark: a table for people, JSON for programs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.machine import describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number."""

    name: str
    value: float | None
    """None when it could not be measured."""
    unit: str
    target: float | None = None
    """Of the ratio; None when there is none."""
    peer: str = ""
    """What `ratio` compares with, and its value; or why there is nothing to compare with."""
    ratio: float | None = None
    """Ours against the peer or limit measured in the same run; greater is better."""
    spread: float | None = None
    """(greatest - least) / median over the runs."""


@dataclass(slots=True)
class Report:
    """Collects rows and remarks; prints both as they come."""

    versions: dict[str, str] = field(default_factory=dict)
    """Of what was measured beside our own environment."""
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        print(_line(row), flush=True)

    def note(self, text: str) -> None:
        """A remark for the reader: what is missing, what was left out, where the time goes."""
        print(text, flush=True)

    def saw(self, versions: Mapping[str, str]) -> None:
        """Versions of a side."""
        self.versions.update(versions)

    def below_target(self) -> list[Row]:
        """Rows that miss their target."""
        return [row for row in self.rows if row.target and row.ratio is not None and row.ratio < row.target]

    def write(self, path: Path) -> None:
        """All rows as JSON: a list of objects with the keys name, value, unit, target, peer, ratio, machine.

        The spread of a row is a row of its own, named NAME/spread.
        """
        machine = describe(self.versions)
        rows = [as_json(part, machine) for row in self.rows for part in (row, *_spread(row))]
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


HEADER = f"{'name':<44} {'value':>12} {'unit':<12} {'spread':>7} {'ratio':>6} {'target':>6}  against"


def as_json(row: Row, machine: Mapping[str, object]) -> dict[str, object]:
    """The row as the contract has it."""
    return {
        "name": row.name,
        "value": row.value,
        "unit": row.unit,
        "target": row.target,
        "peer": row.peer,
        "ratio": row.ratio,
        "machine": machine,
    }


def number(value: float) -> str:
    """Three or more digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(row: Row) -> list[Row]:
    if row.spread is None:
        return []
    return [Row(name=f"{row.name}/spread", value=round(row.spread, 4), unit="of median")]


def _line(row: Row) -> str:
    value = "-" if row.value is None else number(row.value)
    spread = "" if row.spread is None else f"{100 * row.spread:.0f} %"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    target = "" if row.target is None else f"{row.target:g}"
    return f"{row.name:<44} {value:>12} {row.unit:<12} {spread:>7} {ratio:>6} {target:>6}  {row.peer}".rstrip()
