"""Grids against hand-counted examples and properties."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.grid import Grid
from rlhf.errors import LayoutError

GRIDS = st.builds(
    lambda sizes, first: Grid(("tp", "pp", "dp"), tuple(sizes), first),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(0, 5),
)


def test_the_first_axis_varies_fastest() -> None:
    grid = Grid(("tp", "pp", "dp"), (2, 3, 1), first_rank=4)
    assert grid.coords(5) == {"tp": 1, "pp": 0, "dp": 0}
    assert grid.coords(6) == {"tp": 0, "pp": 1, "dp": 0}
    assert list(grid.ranks) == [4, 5, 6, 7, 8, 9]


def test_groups_by_hand() -> None:
    grid = Grid(("tp", "pp", "dp"), (2, 1, 3), first_rank=1)
    assert grid.groups("tp") == [(1, 2), (3, 4), (5, 6)]
    assert grid.groups("dp") == [(1, 3, 5), (2, 4, 6)]
    assert grid.groups("dp", "tp") == [(1, 2, 3, 4, 5, 6)]
    assert grid.groups() == [(1,), (2,), (3,), (4,), (5,), (6,)]


@given(GRIDS)
def test_rank_undoes_coords(grid: Grid) -> None:
    assert [grid.rank(**grid.coords(rank)) for rank in grid.ranks] == list(grid.ranks)


@given(GRIDS, st.sets(st.sampled_from(["tp", "pp", "dp"])))
def test_groups_part_the_ranks_and_vary_only_the_named_axes(grid: Grid, axes: set[str]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
    for group in groups:
        fixed = {tuple(v for a, v in grid.coords(rank).items() if a not in axes) for rank in group}
        varied = {tuple(v for a, v in grid.coords(rank).items() if a in axes) for rank in group}
        assert len(fixed) == 1
        assert varied == set(product(*(range(grid.size(a)) for a in grid.axes if a in axes)))


def test_wrong_grids_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="sizes"):
        Grid(("tp", "dp"), (2, 0))
    with pytest.raises(LayoutError, match="axes"):
        Grid(("tp", "tp"), (2, 2))
    grid = Grid(("tp", "dp"), (2, 3))
    with pytest.raises(LayoutError, match="rank 6 is not among"):
        grid.coords(6)
    with pytest.raises(LayoutError, match="dp = 3 is outside"):
        grid.rank(dp=3)
    with pytest.raises(LayoutError, match="no axis"):
        grid.rank(pp=0)
