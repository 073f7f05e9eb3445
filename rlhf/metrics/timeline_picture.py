"""One step on all ranks as a picture: a row a rank, phases coloured, waiting hatched."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from rlhf.metrics.palette import FAINT, INK, dress, phase_colours, write_png
from rlhf.metrics.series import BRACKETS
from rlhf.metrics.timeline import RankTrace, Timeline
from rlhf.metrics.timers import Interval, Kind

MOST_ROWS = 64
"""Ranks that are drawn, evenly picked when there are more; the trace holds all."""
STRIP = {"forward": "#ffffff", "backward": "#111827", "optimizer": "#d946ef"}
"""Spans of a model that the lower part of a row shows."""
WAIT_FACE, WAIT_EDGE, WAIT_HATCH = "#f8fafc", "#94a3b8", "//////"

Bar = tuple[float, float]


def draw_timeline(timeline: Timeline, picture: Path) -> None:
    """Draw a timeline into a PNG, whole or not at all."""
    write_png(timeline_figure(timeline), picture)


def timeline_figure(timeline: Timeline) -> Figure:
    """The picture of a timeline of at least one rank."""
    shown = _shown(timeline.ranks)
    aligned = timeline.aligned()
    rows = [leaves(aligned[trace.rank]) for trace in shown]
    phases = list(dict.fromkeys(bar.name for bars in rows for bar in bars if bar.kind is Kind.PHASE))
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(14, 1.7 + 0.34 * max(2, len(shown))), dpi=110, layout=layout, facecolor="white")
    figure.suptitle(_title(timeline, shown), x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    ax = figure.add_subplot()
    dress(ax, "", grid="x")
    colours = phase_colours(phases)
    for y, (trace, bars) in enumerate(zip(shown, rows, strict=True)):
        _draw_rank(ax, y, bars, aligned[trace.rank], colours)
    ax.set_xlim(0, timeline.seconds)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_yticks(range(len(shown)), [_row_name(trace, shown) for trace in shown])
    ax.set_xlabel("seconds", fontsize=9, color=FAINT)
    handles = [Patch(color=colours[name], label=name) for name in phases]
    if len(timeline.ranks) > 1:
        handles.append(
            Patch(
                facecolor=WAIT_FACE, edgecolor=WAIT_EDGE, hatch=WAIT_HATCH, linewidth=0, label="waits for other ranks"
            )
        )
    drawn = {i.name for trace in shown for i in aligned[trace.rank]}
    handles += [Patch(facecolor=c, edgecolor=FAINT, label=name) for name, c in STRIP.items() if name in drawn]
    figure.legend(handles=handles, loc="outside lower left", ncols=7, frameon=False, fontsize=8, labelcolor=INK)
    return figure


def leaves(intervals: Sequence[Interval]) -> list[Interval]:
    """Phases that hold no other phase, and outermost waits; of intervals of one rank, in order of beginning."""
    found: list[Interval] = []
    waiting_until = float("-inf")
    for i, interval in enumerate(intervals):
        if interval.kind is Kind.WAIT and interval.start >= waiting_until:
            waiting_until = interval.stop
            found.append(interval)
        elif interval.kind is Kind.PHASE and interval.name not in BRACKETS - {"step"} and not _holds(intervals, i):
            found.append(interval)
    return found


def _holds(intervals: Sequence[Interval], at: int) -> bool:
    """Whether a phase holds another one."""
    outer = intervals[at]
    for inner in intervals[at + 1 :]:
        if inner.start >= outer.stop:
            return False
        if inner.kind is Kind.PHASE and inner.depth > outer.depth:
            return True
    return False


def _draw_rank(
    ax: Axes, y: int, bars: Sequence[Interval], intervals: Sequence[Interval], colours: dict[str, str]
) -> None:
    for name, colour in colours.items():
        ax.broken_barh(_spans(b for b in bars if b.name == name), (y - 0.4, 0.8), facecolor=colour, linewidth=0)
    for name, colour in STRIP.items():
        ax.broken_barh(_spans(i for i in intervals if i.name == name), (y + 0.14, 0.2), facecolor=colour, linewidth=0)
    waits = _spans(b for b in bars if b.kind is Kind.WAIT)
    ax.broken_barh(waits, (y - 0.4, 0.8), facecolor=WAIT_FACE, edgecolor=WAIT_EDGE, hatch=WAIT_HATCH, linewidth=0)


def _spans(intervals: Iterable[Interval]) -> list[Bar]:
    return [(i.start, i.stop - i.start) for i in intervals]


def _shown(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    if len(ranks) <= MOST_ROWS:
        return list(ranks)
    return [ranks[i * len(ranks) // MOST_ROWS] for i in range(MOST_ROWS)]


def _title(timeline: Timeline, shown: Sequence[RankTrace]) -> str:
    some = f", {len(shown)} of {len(timeline.ranks)} ranks" if len(shown) < len(timeline.ranks) else ""
    return f"{timeline.run}, step {timeline.step}: {timeline.seconds:.2f} s{some}"


def _row_name(trace: RankTrace, shown: Sequence[RankTrace]) -> str:
    one_host = len({other.host for other in shown}) == 1
    return f"rank {trace.rank}" if one_host else f"rank {trace.rank}, {trace.host}"
