"""How a check writes ranks, bytes and tables."""

import re
from collections.abc import Iterable, Sequence

GIB = 2**30
FIGURE = re.compile(r"[\d,.]+(-\d+)?%?( [GMK]iB)?|-?")


def spans(numbers: Iterable[int], *, most: int = 4) -> str:
    """Ascending numbers as ranges: `0-7,32-39`; of many ranges the first few and how many more."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in found]
    if len(parts) > most:
        parts = [*parts[:most], f"and {len(parts) - most} more"]
    return ",".join(parts)


def gib(num_bytes: float) -> str:
    """Bytes as GiB; as MiB or KiB where that would be 0.00."""
    for size, unit in ((GIB, "GiB"), (2**20, "MiB")):
        if num_bytes >= size / 100:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes / 2**10:,.2f} KiB" if num_bytes else "0"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head; columns of figures are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(FIGURE.fullmatch(cell) for cell in column[1:]) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  " + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells).rstrip())
    return lines
