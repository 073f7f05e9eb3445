"""One step on all ranks: intervals on one clock, and the trace that Perfetto and chrome://tracing open.

Trace: pid is the rank (named with its host), tid a track of it: `step` holds the phases of the loop, and each role has
one for its computations. Source of the format: "Trace Event Format", Google, complete (X) and metadata (M) events.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.metrics.timers import Interval, Kind

LOOP = "step"
ROLE_PHASES = ("score/", "update/")
"""Phases that are one role's work; what follows is its name."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded."""

    rank: int
    host: str
    intervals: tuple[Interval, ...]
    """By the rank's own clock."""
    ahead_s: float = 0.0
    """How far that clock is ahead of rank 0's."""
    error_s: float = 0.0
    """By how much this may be wrong, either way."""

    def aligned(self, origin: float) -> tuple[Interval, ...]:
        """Intervals by rank 0's clock, from `origin` on, in order of their beginnings, outer ones first."""
        shift = self.ahead_s + origin
        moved = (Interval(i.name, i.start - shift, i.stop - shift, i.kind, i.depth) for i in self.intervals)
        return tuple(sorted(moved, key=lambda i: (i.start, i.depth)))


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step on all ranks."""

    run: str
    step: int
    ranks: tuple[RankTrace, ...]

    @property
    def origin(self) -> float:
        """When the first rank began, by rank 0's clock."""
        return min((i.start - r.ahead_s for r in self.ranks for i in r.intervals), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        return max((i.stop - r.ahead_s for r in self.ranks for i in r.intervals), default=0.0) - self.origin

    def aligned(self) -> dict[int, tuple[Interval, ...]]:
        """Intervals of each rank, in seconds since the first rank began. See `RankTrace.aligned`.

        A rank that is alone waits for nobody: what groups of one do (copies, sums) is work there.
        """
        found = {trace.rank: trace.aligned(self.origin) for trace in self.ranks}
        if len(found) > 1:
            return found
        return {rank: tuple(_as_work(interval) for interval in intervals) for rank, intervals in found.items()}

    def chrome_trace(self) -> dict[str, object]:
        """As plain values for JSON; times in microseconds."""
        events: list[dict[str, object]] = []
        aligned = self.aligned()
        for trace in self.ranks:
            intervals = aligned[trace.rank]
            tracks = tracks_of(intervals)
            names = [LOOP, *sorted(set(tracks) - {LOOP})]
            events += _names(trace, names)
            events += [
                _event(interval, trace.rank, names.index(track))
                for interval, track in zip(intervals, tracks, strict=True)
            ]
        about = {
            "run": self.run,
            "step": self.step,
            "clock_error_s": {str(trace.rank): trace.error_s for trace in self.ranks},
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _as_work(interval: Interval) -> Interval:
    return replace(interval, kind=Kind.WORK) if interval.kind is Kind.WAIT else interval


def tracks_of(intervals: tuple[Interval, ...]) -> list[str]:
    """For each interval of a rank (in order of beginning) its track: that of the innermost role's phase around it."""
    tracks: list[str] = []
    around: list[str] = []  # tracks of the open intervals, by depth
    for interval in intervals:
        track = around[interval.depth - 1] if 0 < interval.depth <= len(around) else LOOP
        if interval.kind is Kind.PHASE and interval.name.startswith(ROLE_PHASES):
            track = interval.name.partition("/")[2]
        del around[interval.depth :]
        around.append(track)
        tracks.append(track)
    return tracks


def _names(trace: RankTrace, tracks: list[str]) -> list[dict[str, object]]:
    def named(what: str, tid: int, args: Mapping[str, object]) -> dict[str, object]:
        return {"name": what, "ph": "M", "pid": trace.rank, "tid": tid, "args": args}

    process = [
        named("process_name", 0, {"name": f"rank {trace.rank} on {trace.host}"}),
        named("process_sort_index", 0, {"sort_index": trace.rank}),
    ]
    return process + [
        event
        for tid, track in enumerate(tracks)
        for event in (named("thread_name", tid, {"name": track}), named("thread_sort_index", tid, {"sort_index": tid}))
    ]


def _event(interval: Interval, rank: int, tid: int) -> dict[str, object]:
    # Whole nanoseconds, each end rounded by itself: intervals that nest do so in the file too.
    start, stop = round(interval.start * 1e9), round(interval.stop * 1e9)
    return {
        "name": interval.name,
        "cat": str(interval.kind),
        "ph": "X",
        "ts": start / 1e3,
        "dur": (stop - start) / 1e3,
        "pid": rank,
        "tid": tid,
    }
