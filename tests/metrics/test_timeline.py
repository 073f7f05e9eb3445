"""From the intervals of ranks to a trace on one clock."""

import json

import pytest

from rlhf.metrics.timeline import RankTrace, Timeline, tracks_of
from rlhf.metrics.timers import Interval, Kind
from tests.metrics.chrome_trace import check_nesting, check_trace

STEP = (
    Interval("forward", 13.0, 14.0, Kind.WORK, 3),
    Interval("update/actor", 12.0, 15.0, Kind.PHASE, 2),
    Interval("rows for critic", 15.5, 16.0, Kind.WAIT, 2),
    Interval("training", 11.0, 17.0, Kind.PHASE, 1),
    Interval("step", 10.0, 18.0, Kind.PHASE, 0),
)  # as a recording gives them, in order of their ends
LATER = tuple(Interval(i.name, i.start + 90.5, i.stop + 90.5, i.kind, i.depth) for i in STEP)
TIMELINE = Timeline("a run", 3, (RankTrace(0, "one", STEP), RankTrace(1, "two", LATER, ahead_s=90.0, error_s=0.001)))


def test_ranks_are_put_on_the_clock_of_rank_0() -> None:
    aligned = TIMELINE.aligned()
    assert (TIMELINE.origin, TIMELINE.seconds) == (10.0, 8.5)
    assert [(i.name, i.start, i.stop) for i in aligned[0]] == [
        ("step", 0.0, 8.0),
        ("training", 1.0, 7.0),
        ("update/actor", 2.0, 5.0),
        ("forward", 3.0, 4.0),
        ("rows for critic", 5.5, 6.0),
    ]
    assert [i.start for i in aligned[1]] == [0.5, 1.5, 2.5, 3.5, 6.0]


def test_a_rank_that_is_alone_waits_for_nobody() -> None:
    def kinds(timeline: Timeline) -> set[str]:
        return {str(event.get("cat")) for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == "X"}

    assert kinds(TIMELINE) == {"phase", "work", "wait"}
    assert kinds(Timeline("a run", 3, TIMELINE.ranks[:1])) == {"phase", "work"}


def test_a_span_is_on_the_track_of_the_role_that_works() -> None:
    assert tracks_of(TIMELINE.aligned()[0]) == ["step", "step", "actor", "actor", "step"]


def test_the_trace_is_what_perfetto_reads() -> None:
    trace = json.loads(json.dumps(TIMELINE.chrome_trace()))
    check_trace(trace)
    events = {(e["pid"], e["name"]): e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len(events) == 10
    forward = events[1, "forward"]
    assert (forward["ts"], forward["dur"], forward["cat"]) == (3.5e6, 1e6, "work")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[1, forward["tid"]] == "actor"
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {0: "rank 0 on one", 1: "rank 1 on two"}
    assert trace["otherData"] == {"run": "a run", "step": 3, "clock_error_s": {"0": 0.0, "1": 0.001}}


def test_ends_that_fall_together_still_nest_in_the_file() -> None:
    ends = [1000.1 + n * 1e-9 / 3 for n in range(8)]
    inner = [Interval(f"i{n}", 1000.1, end, Kind.WORK, 8 - n) for n, end in enumerate(ends)]
    trace = Timeline(
        "a", 1, (RankTrace(0, "h", (*inner, Interval("step", 0.3, ends[-1], Kind.PHASE, 0))),)
    ).chrome_trace()
    check_trace(json.loads(json.dumps(trace)))


def test_the_check_sees_intervals_that_cross() -> None:
    with pytest.raises(AssertionError, match="leaves the interval"):
        check_nesting([{"ts": 0.0, "dur": 5.0}, {"ts": 3.0, "dur": 4.0}])
    check_nesting([{"ts": 0.0, "dur": 5.0}, {"ts": 3.0, "dur": 2.0}, {"ts": 5.0, "dur": 1.0}])
