"""Curves of one run, or of several over one another, as a picture. Knows series of numbers and no trainer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from rlhf.metrics.palette import COLOURS, FAINT, INK, dress, phase_colours, run_colours, whole_steps, write_png
from rlhf.metrics.series import Points, RunSeries, phase_seconds, smoothed

MANY_STEPS = 40  # from here on a line is smoothed, the raw values stay faint behind it
STYLES = ("-", "--", ":")  # of the lines of one panel, where colours tell runs apart
LABEL_CHARS = 28


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: metrics (name, label) over steps."""

    title: str
    lines: tuple[tuple[str, str], ...]
    log: bool = False
    points: tuple[tuple[str, str], ...] = ()
    """Metrics that few steps have, drawn as points."""
    if_moving: bool = False
    """Left out unless a number of it changes in some run."""
    unlike: str = ""
    """Left out unless its numbers differ from this metric's in some run."""


PANELS = (
    Panel("Cross entropy of the answers", (("sft/loss", "nats per token"),)),
    Panel("Reward", (("reward/mean", "mean reward"),), points=(("held_out/solved", "held-out solved"),)),
    Panel("Reward that is learned from", (("shaping/mean", "mean shaped reward"),), unlike="reward/mean"),
    Panel("KL to the reference", (("kl/ref", "per token"),)),
    Panel("Weight of the KL penalty", (("kl/coef", "coefficient"),), if_moving=True),
    Panel("Entropy", (("actor/entropy", "nats per token"),)),
    Panel("Response length", (("length/response_mean", "mean"), ("length/response_max", "longest"))),
    Panel("Policy loss", (("actor/loss", "actor"),)),
    Panel("Value loss", (("critic/loss", "critic"),)),
    Panel("Share of tokens clipped", (("actor/clip_fraction", "policy"), ("critic/clip_fraction", "values"))),
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


def draw_curves(runs: Sequence[RunSeries], picture: Path, *, smooth: int = 0) -> None:
    """Draw one run, or several with a colour each, into a PNG, whole or not at all. See `curves_figure`."""
    write_png(curves_figure(runs, smooth=smooth), picture)


def curves_figure(runs: Sequence[RunSeries], *, smooth: int = 0) -> Figure:
    """The picture of at least one run; a panel that no run has numbers for is left out.

    smooth: Steps that a line is averaged over; 0 is a tenth of them where there are many, 1 is none.
    """
    panels = [panel for panel in PANELS if any(_worth_drawing(panel, run) for run in runs)]
    phases = {i: found for i, run in enumerate(runs) if (found := phase_seconds(run.metrics))}
    num_panels = max(1, len(panels) + bool(phases))
    columns = min(num_panels, 3 if num_panels <= 12 else 4)
    figure, axes = _figure(num_panels, columns)
    for ax, panel in zip(axes, panels, strict=False):
        dress(ax, panel.title)
        _draw(ax, panel, runs, smooth)
        whole_steps(ax)
    if phases and len(runs) == 1:
        _stack_phases(axes[-1], phases[0])
    elif phases:
        _compare_phases(axes[-1], runs, phases)
    for ax in axes[max(0, num_panels - columns) : len(panels)]:
        ax.set_xlabel("step", fontsize=8, color=FAINT)
    _head(figure, runs)
    return figure


def _worth_drawing(panel: Panel, run: RunSeries) -> bool:
    series = [run.metrics[name] for name in _names(panel) if name in run.metrics]
    if panel.unlike:
        series = [points for points in series if points != run.metrics.get(panel.unlike)]
    return any(len({value for _, value in points}) > panel.if_moving for points in series)


def _names(panel: Panel) -> list[str]:
    return [name for name, _ in panel.lines + panel.points]


def _figure(num_panels: int, columns: int) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(num_panels / columns)
    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows + 0.5), dpi=110, layout=layout, facecolor="white")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(num_panels)]


def _head(figure: Figure, runs: Sequence[RunSeries]) -> None:
    """The name of the run, or a legend of several."""
    if len(runs) == 1:
        figure.suptitle(
            f"{runs[0].label}, {runs[0].num_steps} steps", x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold"
        )
        return
    handles = [
        Line2D([], [], color=colour, linewidth=2.4, label=f"{_short(run.label)}, {run.num_steps} steps")
        for colour, run in zip(run_colours(len(runs)), runs, strict=True)
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(4, len(runs)), frameon=False, fontsize=11, labelcolor=INK
    )


def _draw(ax: Axes, panel: Panel, runs: Sequence[RunSeries], smooth: int) -> None:
    present = [(name, label) for name, label in panel.lines if any(name in run.metrics for run in runs)]
    drawn = [run.metrics[name] for run in runs for name, _ in present if name in run.metrics]
    if panel.log and drawn and all(value > 0 for points in drawn for _, value in points):
        ax.set_yscale("log")
        ax.tick_params(which="minor", labelsize=7, colors=FAINT, length=0)
    several = len(runs) > 1
    for run, run_colour in zip(runs, run_colours(len(runs)), strict=True):
        for i, (name, label) in enumerate(present):
            colour, style = (run_colour, STYLES[i % len(STYLES)]) if several else (COLOURS[i], "-")
            _line(ax, run.metrics.get(name, ()), smooth, colour=colour, style=style, label=label)
        for name, label in panel.points:
            steps, values = _columns(run.metrics.get(name, ()))
            colour = run_colour if several else COLOURS[1]
            ax.plot(steps, values, "o--", color=colour, markersize=5, linewidth=0.8, label=label if steps else None)
    _panel_legend(ax, several=several)


def _line(ax: Axes, points: Points, smooth: int, *, colour: str, style: str, label: str) -> None:
    steps, values = _columns(points)
    if not steps:
        return
    reach = (smooth or (len(steps) // 10 if len(steps) >= MANY_STEPS else 1)) // 2
    if reach:
        ax.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
        values = smoothed(values, reach)
    marker = "." if len(steps) < 3 else None
    ax.plot(steps, values, color=colour, linestyle=style, linewidth=1.6, label=label, marker=marker)


def _panel_legend(ax: Axes, *, several: bool) -> None:
    """Which line is which metric; with several runs by the style of the line alone."""
    lines = [line for line in ax.get_legend_handles_labels()[0] if isinstance(line, Line2D)]
    first = {str(line.get_label()): line for line in reversed(lines)}
    if len(first) < 2:
        return
    shown = [
        Line2D(
            [],
            [],
            color=FAINT if several else line.get_color(),
            linestyle=line.get_linestyle(),
            linewidth=line.get_linewidth(),
            marker="o" if line.get_marker() == "o" else None,
            markersize=5,
            label=label,
        )
        for label, line in reversed(first.items())
    ]
    ax.legend(handles=shown, fontsize=8, frameon=True, framealpha=0.8, edgecolor="white", labelcolor=INK, loc="best")


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _stack_phases(ax: Axes, phases: Mapping[str, Points]) -> None:
    """Seconds of each phase over the steps."""
    dress(ax, "Seconds per phase")
    steps = sorted({step for points in phases.values() for step, _ in points})
    stacks = [[dict(points).get(step, 0.0) for step in steps] for points in phases.values()]
    edges: Sequence[float] = steps
    if len(steps) == 1:
        edges, stacks = [steps[0] - 0.4, steps[0] + 0.4], [stack * 2 for stack in stacks]
    colours = list(phase_colours(phases).values())
    ax.stackplot(edges, stacks, labels=list(phases), colors=colours, linewidth=0)
    ax.set_ylim(0, 1.4 * max(map(sum, zip(*stacks, strict=True))))  # room for the legend
    _phase_legend(ax)
    whole_steps(ax)


def _compare_phases(ax: Axes, runs: Sequence[RunSeries], phases: Mapping[int, Mapping[str, Points]]) -> None:
    """One bar a run: seconds a step of each phase, over the steps that were timed."""
    dress(ax, "Seconds per step, by phase", grid="x")
    names = list(dict.fromkeys(name for of in phases.values() for name in of if name != "other"))
    names += ["other"] if any("other" in of for of in phases.values()) else []
    colours, longest = phase_colours(names), 0.0
    for row, (i, of) in enumerate(phases.items()):
        num_steps = len({step for points in of.values() for step, _ in points})
        left = 0.0
        for name in names:
            width = math.fsum(value for _, value in of.get(name, ())) / num_steps
            ax.barh(row, width, left=left, color=colours[name], height=0.4, label=name if row == 0 else None)
            left += width
        ax.text(left, row, f" {left:.3g}", va="center", fontsize=8, color=FAINT)
        colour = run_colours(len(runs))[i]
        ax.text(0, row - 0.24, _short(runs[i].label), va="bottom", fontsize=8, color=colour)
        longest = max(longest, left)
    ax.set_yticks([])
    ax.set_xlim(0, 1.12 * longest)
    ax.set_ylim(len(phases) - 0.6, -0.6 - 0.4 * len(phases) - 0.3)  # first run on top, room for the legend
    _phase_legend(ax)


def _phase_legend(ax: Axes) -> None:
    ax.legend(
        fontsize=7,
        framealpha=1.0,
        edgecolor="none",
        labelcolor=INK,
        loc="upper left",
        ncols=3,
        columnspacing=1.0,
        handlelength=1.0,
    )


def _short(label: str) -> str:
    return label if len(label) <= LABEL_CHARS else f"...{label[3 - LABEL_CHARS :]}"
