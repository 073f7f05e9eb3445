"""Where roles lie, and what the borders of nodes cut."""

from rlhf.dist.grid import Grid
from rlhf.preflight.placement import placement_notes, render_placement
from rlhf.preflight.text import gib, spans, table

GRIDS = {
    "actor": Grid(("tp", "pp", "dp"), (8, 2, 4), 0),
    "critic": Grid(("tp", "pp", "dp"), (4, 3, 2), 64),
    "rollout": Grid(("tp", "engine"), (6, 4), 0),
}


def test_a_cluster_has_a_line_a_role() -> None:
    lines = render_placement(GRIDS, {"actor": "vpp2 ep16"}, world_size=88, gpus_per_node=8).splitlines()
    assert lines[0] == "88 ranks, 11 nodes of 8"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "actor 0-63 0-7 tp8 pp2 dp4 vpp2 ep16 pp0 0-7 pp1 8-15 (dp r: + 16 r)",
        "critic 64-87 8-10 tp4 pp3 dp2 pp0 64-67 pp1 68-71 pp2 72-75 (dp r: + 12 r)",
        "rollout 0-23 0-2 tp6 engine4 0-5 (engine r: + 6 r)",
    ]


def test_every_rank_of_the_compact_form_is_where_the_grid_says() -> None:
    grid = GRIDS["critic"]
    for group in grid.groups("tp"):  # as the line above reads: pp p of replica r is 64 + 4 p + 12 r and on
        at = grid.coords(group[0])
        assert group[0] == 64 + 4 * at["pp"] + 12 * at["dp"]


def test_few_ranks_have_a_line_each() -> None:
    text = render_placement(
        {"actor": Grid(("tp", "pp", "dp"), (2, 2, 1), 0), "rollout": Grid(("tp", "engine"), (1, 2), 3)},
        {},
        world_size=5,
        gpus_per_node=8,
    )
    assert [" ".join(line.split()) for line in text.splitlines()[-6:]] == [
        "rank actor rollout",
        "0 tp0 pp0 -",
        "1 tp1 pp0 -",
        "2 tp0 pp1 -",
        "3 tp1 pp1 engine0",
        "4 - engine1",
    ]


def test_what_nodes_cut_is_noted() -> None:
    notes = placement_notes(GRIDS, world_size=88, gpus_per_node=8)
    assert [note.split(":")[0] for note in notes] == ["rollout"]
    assert "2 of 4 tp groups cross nodes, the first on ranks 6-11" in notes[0]
    notes = placement_notes(GRIDS, world_size=88, gpus_per_node=5)
    cuts = [note for note in notes if "cuts node" in note]
    assert [note.split(",")[0] for note in cuts] == [
        "actor: its pool (ranks 0-63) cuts node 12",
        "critic: its pool (ranks 64-87) cuts node 12",
        "rollout: its pool (ranks 0-23) cuts node 4",
    ]
    assert placement_notes({"actor": Grid(("tp", "dp"), (4, 3))}, world_size=12, gpus_per_node=12) == []


def test_ranks_and_bytes_are_short() -> None:
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spans(range(0, 20, 2)) == "0,2,4,6,and 6 more"
    assert [gib(n) for n in (0, 512, 2**20, 2**30, 3 * 2**40)] == [
        "0",
        "0.50 KiB",
        "1.00 MiB",
        "1.00 GiB",
        "3,072.00 GiB",
    ]


def test_columns_of_figures_end_alike() -> None:
    assert table([["role", "bytes"], ["a", "1.00 GiB"], ["bcd", "10.00 MiB"]]) == [
        "  role      bytes",
        "  a      1.00 GiB",
        "  bcd   10.00 MiB",
    ]
