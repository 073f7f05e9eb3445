"""Colours and dress of all pictures, so that a phase looks the same in each. The only matplotlib is the axes given."""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#64748b")
PHASE_COLOURS = {
    "rollout/sync": "#1e3a8a",
    "rollout/generate": "#3b82f6",
    "reward": "#eab308",
    "score/reference": "#a7c957",
    "score/critic": "#4d9f5b",
    "score/actor": "#166534",
    "update/critic": "#fb923c",
    "update/actor": "#dc2626",
    "step": "#64748b",
    "evaluate": "#a78bfa",
    "save": "#78716c",
    "other": "#d1d5db",
}
SPARE_COLOURS = ("#0891b2", "#db2777", "#7c3aed", "#a16207", "#0f766e", "#be123c")


def phase_colours(phases: Iterable[str]) -> dict[str, str]:
    """A colour for each phase; those that are not known here take spare ones in order."""
    names = list(phases)
    others = [name for name in names if name not in PHASE_COLOURS]
    spare = {name: SPARE_COLOURS[i % len(SPARE_COLOURS)] for i, name in enumerate(others)}
    return {name: PHASE_COLOURS.get(name) or spare[name] for name in names}


def run_colours(number: int) -> list[str]:
    """A colour for each of several lines; they come again after eight."""
    return [COLOURS[i % len(COLOURS)] for i in range(number)]


def dress(ax: Axes, title: str, *, grid: str = "y") -> None:
    """Title and a quiet frame; `grid` is the axis whose values are ruled."""
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.grid(axis="x" if grid == "x" else "y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=FAINT, labelsize=8, length=0)
    ax.margins(x=0.02)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)


def whole_steps(ax: Axes) -> None:
    """Ticks at whole steps, also when there is one step only."""
    low, high = ax.get_xlim()
    if high - low < 1.0:
        ax.set_xlim(low - 0.6, high + 0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def write_png(figure: Figure, picture: Path) -> None:
    """Write a picture, whole or not at all."""
    part = picture.with_name(f".{picture.name}.part")
    FigureCanvasAgg(figure).print_png(str(part))
    part.replace(picture)
