"""What the picture of a step shows."""

from pathlib import Path

from matplotlib.colors import to_hex

from rlhf.metrics.palette import PHASE_COLOURS
from rlhf.metrics.timeline import RankTrace, Timeline
from rlhf.metrics.timeline_picture import MOST_ROWS, STRIP, draw_timeline, leaves, timeline_figure
from tests.metrics.test_timeline import STEP, TIMELINE


def test_a_row_shows_phases_that_hold_no_other_and_outermost_waits() -> None:
    assert [i.name for i in leaves(TIMELINE.aligned()[0])] == ["update/actor", "rows for critic"]


def test_bars_lie_where_the_phase_ran() -> None:
    (ax,) = timeline_figure(TIMELINE).axes
    bars = {}
    for collection in ax.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            bars.setdefault(to_hex(collection.get_facecolor()[0]), []).append((box.x0, box.x1, round(box.y0, 9)))
    assert bars[PHASE_COLOURS["update/actor"]] == [(2.0, 5.0, -0.4), (2.5, 5.5, 0.6)]
    assert bars[STRIP["forward"]] == [(3.0, 4.0, 0.14), (3.5, 4.5, 1.14)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0, one", "rank 1, two"]


def test_many_ranks_are_thinned_out_evenly_and_the_title_says_so(tmp_path: Path) -> None:
    ranks = tuple(RankTrace(rank, "h", STEP) for rank in range(3 * MOST_ROWS))
    figure = timeline_figure(Timeline("a", 1, ranks))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["rank 0", "rank 3"]
    assert len(labels) == MOST_ROWS
    assert figure.get_suptitle() == f"a, step 1: 8.00 s, {MOST_ROWS} of {3 * MOST_ROWS} ranks"
    draw_timeline(TIMELINE, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
