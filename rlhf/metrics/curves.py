"""Curves of a run as a picture, drawn from its metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rlhf.metrics.names import time_name

INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#64748b")
MANY_STEPS = 40  # from here on a line is smoothed, the raw values stay faint behind it
NUM_COLUMNS = 3
BRACKETS = {"step", "training"}  # phases that hold phases of other names
OUTSIDE_STEP = {"evaluate", "save"}

Series = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: metrics (name, label) over steps."""

    title: str
    lines: tuple[tuple[str, str], ...]
    log: bool = False
    points: tuple[tuple[str, str], ...] = ()
    """Metrics that few steps have, drawn as points."""


PANELS = (
    Panel("Loss", (("sft/loss", "cross entropy"),)),
    Panel("Reward", (("reward/mean", "mean reward"),), points=(("held_out/solved", "held-out solved"),)),
    Panel("KL to the reference", (("kl/ref", "per token"),)),
    Panel("Entropy", (("actor/entropy", "nats per token"),)),
    Panel("Response length", (("length/response_mean", "mean"), ("length/response_max", "longest"))),
    Panel(
        "Gradient norm",
        (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic"), ("sft/grad_norm", "model")),
        log=True,
    ),
    Panel(
        "Rollout against trainer, |log-prob difference|", (("mismatch/mean", "mean"), ("mismatch/max", "max")), log=True
    ),
    Panel("Critic, explained variance", (("value/explained_variance", "explained variance"),)),
    Panel("Tokens per second", (("rate/tokens_per_s", "tokens/s"),)),
)


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) pairs of each metric in a metrics.jsonl; nulls and lines cut short by a crash are left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        step = line.pop("step")
        for name, value in line.items():
            if value is not None:
                series.setdefault(name, []).append((step, value))
    return series


def draw_curves(metrics: Path, picture: Path, *, title: str) -> None:
    """Draw the curves of a metrics.jsonl into a PNG; a panel without numbers is left out."""
    series = read_metrics(metrics)
    panels = [panel for panel in PANELS if any(name in series for name, _ in panel.lines + panel.points)]
    phases = phase_seconds(series)
    num_panels = max(1, len(panels) + bool(phases))
    columns = min(NUM_COLUMNS, num_panels)
    rows = math.ceil(num_panels / columns)
    size = (4.6 * columns, 2.9 * rows + 0.5)
    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
    figure = Figure(figsize=size, dpi=110, layout=layout, facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(num_panels)]
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel, series)
    if phases:
        _draw_phases(axes[len(panels)], phases)
    part = picture.with_name(f".{picture.name}.part")
    FigureCanvasAgg(figure).print_png(str(part))
    part.replace(picture)


def phase_seconds(series: Series) -> dict[str, Sequence[tuple[int, float]]]:
    """Mean seconds over the ranks of each phase that holds no other, longest first, then the rest of the step."""
    prefix, suffix = time_name("|").split("|")
    names = [name for name in series if name.startswith(prefix) and name.endswith(suffix)]
    phases = {name.removeprefix(prefix).removesuffix(suffix): series[name] for name in names}
    holders = {phase.partition("/")[0] for phase in phases if "/" in phase} | BRACKETS
    leaves = {phase: points for phase, points in phases.items() if phase not in holders}
    ordered = dict(sorted(leaves.items(), key=lambda item: -sum(value for _, value in item[1])))
    inside = [dict(points) for phase, points in leaves.items() if phase not in OUTSIDE_STEP]
    rest = [(step, max(0.0, s - sum(part.get(step, 0.0) for part in inside))) for step, s in phases.get("step", ())]
    return {**ordered, "other": rest} if leaves and rest else ordered


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean over each value and up to `reach` values on either side of it."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _draw(ax: Axes, panel: Panel, series: Series) -> None:
    _dress(ax, panel.title)
    present = [(name, label) for name, label in panel.lines if name in series]
    positive = all(value > 0 for name, _ in present for _, value in series[name])
    if panel.log and present and positive:
        ax.set_yscale("log")
        ax.tick_params(which="minor", labelsize=7, colors=FAINT, length=0)
    for colour, (name, label) in zip(COLOURS, present, strict=False):
        steps, values = _columns(series[name])
        if len(steps) >= MANY_STEPS:
            ax.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = smoothed(values, len(values) // 20)
        ax.plot(steps, values, color=colour, linewidth=1.6, label=label, marker="." if len(steps) < 3 else None)
    for name, label in panel.points:
        if name in series:
            steps, values = _columns(series[name])
            ax.plot(steps, values, "o--", color=COLOURS[1], markersize=5, linewidth=0.8, label=label)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        _legend(ax)
    _whole_steps(ax)


def _draw_phases(ax: Axes, phases: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    _dress(ax, "Seconds per phase")
    steps = sorted({step for points in phases.values() for step, _ in points})
    stacks = [[dict(points).get(step, 0.0) for step in steps] for points in phases.values()]
    edges: Sequence[float] = steps
    if len(steps) == 1:
        edges, stacks = [steps[0] - 0.4, steps[0] + 0.4], [stack * 2 for stack in stacks]
    ax.stackplot(edges, stacks, labels=list(phases), colors=COLOURS, alpha=0.85, linewidth=0)
    ax.set_ylim(0, 1.3 * max(map(sum, zip(*stacks, strict=True))))  # room for the legend
    ax.legend(fontsize=7, frameon=False, labelcolor=INK, loc="upper left", ncols=3, columnspacing=1.0, handlelength=1.0)
    _whole_steps(ax)


def _dress(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=FAINT, labelsize=8, length=0)
    ax.margins(x=0.02)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)


def _legend(ax: Axes) -> None:
    ax.legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="white", labelcolor=INK, loc="best")


def _whole_steps(ax: Axes) -> None:
    """Ticks at whole steps, also when there is one step only."""
    low, high = ax.get_xlim()
    if high - low < 1.0:
        ax.set_xlim(low - 0.6, high + 0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
