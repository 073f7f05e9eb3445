"""What Perfetto needs of a Chrome trace, checked without the code that writes it."""

from collections import defaultdict
from numbers import Real

META = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_trace(trace: dict) -> None:
    """Raise AssertionError unless events have the fields of their kind, tracks are named, and intervals nest."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named, used = defaultdict(set), set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"}
            assert set(event["args"]) == {META[event["name"]]}
            named[event["name"]].add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert set(event) == {"name", "ph", "cat", "ts", "dur", "pid", "tid"}
            assert isinstance(event["ts"], Real)
            assert event["ts"] >= 0
            assert isinstance(event["dur"], Real)
            assert event["dur"] >= 0
            used.add((event["pid"], event["tid"]))
    assert used <= named["thread_name"]
    assert {pid for pid, _ in used} == {pid for pid, _ in named["process_name"]}
    for track in used:
        check_nesting([e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == track])


def check_nesting(events: list[dict]) -> None:
    """Raise AssertionError unless any two intervals of a track are apart or one lies in the other (to 1 ns)."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        stop = event["ts"] + event["dur"]
        assert not open_until or stop <= open_until[-1] + 2e-3, f"{event} leaves the interval around it"
        open_until.append(stop)


def intervals(trace: dict, rank: int, category: str) -> list[tuple[str, float]]:
    """(name, seconds) of a rank's intervals of a category, in order of beginning."""
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category]
    return [(e["name"], e["dur"] / 1e6) for e in sorted(found, key=lambda e: e["ts"])]
