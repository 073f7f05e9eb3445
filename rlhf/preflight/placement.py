"""Roles on ranks and nodes, as text: compact for a cluster, rank by rank for a laptop."""

from collections.abc import Iterable, Mapping, Sequence

from rlhf.config.rollout import RolloutConfig
from rlhf.dist.grid import Grid
from rlhf.preflight.text import spans, table
from rlhf.rollout.sglang.multi_host.nodes import nodes_of

FEW_RANKS = 16
"""Up to so many ranks the table has a line for each."""


def render_placement(grids: Mapping[str, Grid], cuts: Mapping[str, str], *, world_size: int, gpus_per_node: int) -> str:
    """A table of roles; for few ranks, one of ranks too. Axes of a grid are named as its coordinates.

    `cuts` says how a role cuts what its ranks hold beyond the axes of its grid.
    """
    nodes = -(-world_size // gpus_per_node)
    lines = [f"{world_size} ranks, {nodes} nodes of {gpus_per_node}" if nodes > 1 else f"{world_size} ranks, one node"]
    rows = [["role", "ranks", "nodes", "layout", "ranks of the first replica, and of the next"]]
    rows += [_role_row(name, grid, cuts.get(name, ""), gpus_per_node) for name, grid in grids.items()]
    lines += table(rows)
    if world_size <= FEW_RANKS:
        rows = [["rank", *grids]]
        rows += [[str(rank), *(_at(grid, rank) for grid in grids.values())] for rank in range(world_size)]
        lines += ["", *table(rows)]
    return "\n".join(lines)


def placement_notes(grids: Mapping[str, Grid], *, world_size: int, gpus_per_node: int) -> list[str]:
    """Where the nodes' borders cut what talks much: tp groups, and pools."""
    notes = []
    for name, grid in grids.items():
        groups = [group for group in grid.groups("tp") if len(_nodes(group, gpus_per_node)) > 1]
        if groups:
            notes.append(
                f"{name}: {len(groups)} of {len(grid.groups('tp'))} tp groups cross nodes, the first on ranks "
                f"{spans(groups[0])}; their all-reduces in every layer go over the network; let tp divide "
                f"{gpus_per_node} and the pool begin at a multiple of it"
            )
        cut = [edge for edge in (grid.ranks.start, grid.ranks.stop) if edge % gpus_per_node and edge != world_size]
        if cut and world_size > gpus_per_node:
            notes.append(
                f"{name}: its pool (ranks {spans(grid.ranks)}) cuts node {cut[0] // gpus_per_node}, whose other ranks "
                "it leaves to other roles; begin and end pools at a multiple of the node's size"
            )
    return notes


def check_engine_nodes(config: RolloutConfig, *, gpus_per_node: int) -> None:
    """Raise LayoutError unless SGLang can place the processes of every engine on such nodes."""
    for ranks in config.engines:
        nodes_of([(f"node {rank // gpus_per_node}", rank % gpus_per_node) for rank in ranks])


def _role_row(name: str, grid: Grid, cut: str, gpus_per_node: int) -> list[str]:
    axes = [f"{axis}{size}" for axis, size in zip(grid.axes, grid.sizes, strict=True) if size > 1]
    layout = " ".join([*axes, *cut.split()]) or "alone"
    outer = grid.axes[-1]
    replica = [group for group in grid.groups("tp") if grid.coords(group[0])[outer] == 0]
    first = "  ".join(
        f"pp{number} {spans(group)}" if len(replica) > 1 else spans(group) for number, group in enumerate(replica)
    )
    if grid.size(outer) > 1:
        first += f"  ({outer} r: + {grid.num_ranks // grid.size(outer)} r)"
    nodes = spans(_nodes(grid.ranks, gpus_per_node))
    return [name, spans(grid.ranks), nodes, layout, first]


def _nodes(ranks: Iterable[int], gpus_per_node: int) -> Sequence[int]:
    return sorted({rank // gpus_per_node for rank in ranks})


def _at(grid: Grid, rank: int) -> str:
    if rank not in grid.ranks:
        return "-"
    return " ".join(f"{axis}{at}" for axis, at in grid.coords(rank).items() if grid.size(axis) > 1) or "all"
