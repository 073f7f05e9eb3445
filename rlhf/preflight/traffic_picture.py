"""A picture of a studied weight sync: who sends to whom, bytes of each rank by link, and the other ways beside it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rlhf.metrics.palette import COLOURS, FAINT, GRID, INK, dress, write_png
from rlhf.preflight.link_time import Bandwidths
from rlhf.preflight.text import GIB, gib
from rlhf.preflight.transition import Study
from rlhf.preflight.transition_report import Way, engines_text, layout_text, ways
from rlhf.reshard.topology import Link

FEW_RANKS = 16
"""Up to so many ranks each cell of the matrix says its bytes and each rank has its name."""

MANY_RANKS = 256
"""Beyond so many ranks a cell of the matrix is a pair of nodes."""

LINK_COLOURS = {Link.SAME_RANK: "#cbd5e1", Link.SAME_NODE: COLOURS[0], Link.ACROSS_NODES: COLOURS[1]}
_BLUES = LinearSegmentedColormap.from_list("bytes", ["#dbeafe", "#2563eb", "#172554"])


def draw_traffic(study: Study, bandwidths: Bandwidths, picture: Path) -> None:
    """Draw it into a PNG, whole or not at all."""
    write_png(traffic_figure(study, bandwidths), picture)


def traffic_figure(study: Study, bandwidths: Bandwidths) -> Figure:
    """Left the matrix of senders and receivers; right bytes of ranks, and the ways compared."""
    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
    figure = Figure(figsize=(15.5, 8.4), dpi=110, layout=layout, facecolor="white")
    grid = figure.add_gridspec(3, 2, width_ratios=(1, 1), height_ratios=(1.15, 1.15, 1))
    _matrix(figure, figure.add_subplot(grid[:, 0]), study)
    above, below = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    _by_rank(above, study, incoming=True)
    _by_rank(below, study, incoming=False)
    _compare(figure.add_subplot(grid[2, 1]), ways(study, bandwidths))
    of, found = study.transition, study.certificate
    figure.suptitle(
        f"{of.model}: {layout_text(of.parallel)} to {engines_text(of)} ({of.engine}), {len(study.ranks)} ranks; "
        f"{gib(found.moved)} moved, ratio {found.ratio:.3f}",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=13,
        fontweight="bold",
    )
    return figure


def _matrix(figure: Figure, ax: Axes, study: Study) -> None:
    between = study.moved.copy()
    np.fill_diagonal(between, 0)
    senders, receivers = study.transition.parallel.ranks, study.transition.engines.ranks
    at = {rank: place for place, rank in enumerate(study.ranks)}
    shown = between[np.ix_([at[rank] for rank in senders], [at[rank] for rank in receivers])] / GIB
    rows, columns, word = [*senders], [*receivers], "rank"
    if max(shown.shape) > MANY_RANKS:
        nodes, word = study.transition.topology.nodes, "node"
        shown = _by_node(_by_node(shown, [nodes[rank] for rank in rows]).T, [nodes[rank] for rank in columns]).T
        rows, columns = ([*dict.fromkeys(nodes[rank] for rank in pool)] for pool in (senders, receivers))
    dress(ax, f"Bytes from each {word} (down) to each {word} (across); empty: nothing")
    ax.grid(visible=False)
    if not shown.any():
        ax.text(0.5, 0.5, "nothing moves between ranks", transform=ax.transAxes, ha="center", color=FAINT)
        ax.set_xticks([])
        ax.set_yticks([])
        return
    least, most = float(shown[shown > 0].min()), float(shown.max())
    norm = LogNorm(vmin=least * (0.5 if least == most else 0.999), vmax=most)
    masked = np.ma.masked_equal(shown, 0.0)
    image = ax.imshow(masked, cmap=_BLUES, norm=norm, aspect="equal", interpolation="none")
    few = max(shown.shape) <= FEW_RANKS
    if few:
        _write_cells(ax, shown, norm)
    else:
        bar = figure.colorbar(image, ax=ax, location="bottom", shrink=0.6, aspect=40, pad=0.02, label="GiB")
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.tick_params(labelsize=8, colors=FAINT, which="both")
        bar.outline.set_visible(False)
    for axis, names, role in ((ax.xaxis, columns, "receiving"), (ax.yaxis, rows, "sending")):
        _tick_names(axis, names, few=few)
        axis.set_label_text(f"{role} {word}", fontsize=8, color=FAINT)
    if word == "rank":
        _node_borders(ax, study, rows, columns)


def _by_node(rows: npt.NDArray[np.float64], nodes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Sums of the rows of each node."""
    starts = [at for at, node in enumerate(nodes) if at == 0 or nodes[at - 1] != node]
    return np.add.reduceat(rows, starts, axis=0)


def _write_cells(ax: Axes, shown: npt.NDArray[np.float64], norm: LogNorm) -> None:
    size = 9 if max(shown.shape) <= 8 else 6
    for (row, column), value in np.ndenumerate(shown):
        if value > 0:
            colour = "white" if norm(value) > 0.4 else INK
            text = gib(value * GIB).replace(" ", "\n", 1)
            ax.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def _tick_names(axis: Axis, names: Sequence[int], *, few: bool) -> None:
    """Numbers of ranks (or nodes) at whole places; all of them where there are few."""

    def name(at: float, _: int) -> str:
        return str(names[int(at)]) if at == int(at) and 0 <= at < len(names) else ""

    axis.set_major_locator(MaxNLocator(integer=True, nbins=len(names) + 1 if few else 9))
    axis.set_major_formatter(FuncFormatter(name))


def _node_borders(ax: Axes, study: Study, rows: Sequence[int], columns: Sequence[int]) -> None:
    """Lines where a node ends, as long as they leave room for what they part."""
    nodes = study.transition.topology.nodes
    for ranks, line in ((columns, ax.axvline), (rows, ax.axhline)):
        edges = [at + 0.5 for at, (a, b) in enumerate(pairwise(ranks)) if nodes[a] != nodes[b]]
        for edge in edges if len(edges) <= 40 else ():
            line(edge, color=GRID if len(edges) > 8 else FAINT, linewidth=0.6)


def _by_rank(ax: Axes, study: Study, *, incoming: bool) -> None:
    found = study.certificate.ranks
    links = (Link.SAME_RANK, Link.SAME_NODE, Link.ACROSS_NODES) if incoming else (Link.SAME_NODE, Link.ACROSS_NODES)
    words = {Link.SAME_RANK: "copied inside the rank", Link.SAME_NODE: "same node", Link.ACROSS_NODES: "across nodes"}
    dress(ax, "GiB that each rank receives" if incoming else "GiB that each rank sends")
    places, base = np.arange(len(found)), np.zeros(len(found))
    for link in links:
        counts = np.array([(one.received if incoming else one.sent)[link] for one in found]) / GIB
        if counts.any():
            width = 0.8 if len(found) <= 64 else 1.0
            ax.bar(places, counts, width, bottom=base, color=LINK_COLOURS[link], label=words[link])
        base += counts
    ax.set_ylim(0, max(float(base.max()), 1e-9) * 1.25)
    _tick_names(ax.xaxis, study.ranks, few=len(found) <= FEW_RANKS)
    if base.any():
        ax.legend(loc="upper left", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    if not incoming:
        ax.set_xlabel("rank", fontsize=8, color=FAINT)


def _compare(ax: Axes, found: Sequence[Way]) -> None:
    dress(ax, "GiB of a rank on average", grid="x")
    shown = [way for way in found if way.mean is not None and way.peak is not None]
    places = np.arange(len(shown))[::-1]
    figures = (
        ("received", [way.mean or 0.0 for way in shown], COLOURS[0], 0.2),
        ("parameters at the peak", [way.peak or 0.0 for way in shown], COLOURS[7], -0.2),
    )
    most = max(max(values) for _, values, _, _ in figures)
    for label, values, colour, shift in figures:
        ax.barh(places + shift, [value / GIB for value in values], 0.36, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            ax.text((value + most * 0.01) / GIB, place + shift, gib(value), va="center", fontsize=8, color=INK)
    ax.set_yticks(places, [way.name + (" *" if way.misfits else "") for way in shown], fontsize=8, color=INK)
    ax.set_xlim(0, most * 1.22 / GIB)
    if any(way.misfits for way in shown):
        ax.set_xlabel("* assumes what these layouts do not give", fontsize=8, color=FAINT)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8, labelcolor=INK)
