"""What our engine on SGLang costs beyond SGLang's own, as a share of a generation.

Two generations cannot tell it: on a small machine their times differ by more than is looked for. So it is counted: the
time at both edges of a call, when SGLang has no request yet or has answered all, and for what goes on meanwhile the
processor seconds of leader rank and host beyond those that SGLang's own front process takes for the same requests, as
if each of them had kept SGLang waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row

MOST = 0.05
"""Of a generation."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one generation, in seconds."""

    generation_s: float
    edges_s: float
    """From the call to SGLang's first request, and from its last answer to the return."""
    leader_s: float
    """Processor time of the leader rank."""
    host_s: float
    """The same of the host process."""
    own_s: float
    """The same of SGLang's front process where nothing of ours is around it."""

    @property
    def share(self) -> float:
        """Of the generation; what the leader does at the edges counts twice."""
        return (self.edges_s + max(0.0, self.leader_s + self.host_s - self.own_s)) / self.generation_s


def costs_of(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Of each run, beside the run of the other side in the same turn."""
    return [
        Cost(
            generation_s=mine["seconds"],
            edges_s=mine["edges_s"],
            leader_s=mine["processor_s"]["leader"],
            host_s=mine["processor_s"]["front"],
            own_s=their["processor_s"]["front"],
        )
        for mine, their in zip(ours, theirs, strict=True)
    ]


def add_cost(
    report: Report, name: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], peer: str
) -> None:
    """Rows `NAME/cost`, and `NAME/schedulers`: processor seconds of the processes in which SGLang computes."""
    costs = costs_of(ours, theirs)
    share = Runs(tuple(one.share for one in costs))
    parts = {
        "edges": median(one.edges_s for one in costs),
        "leader": median(one.leader_s for one in costs),
        "host": median(one.host_s for one in costs),
        f"less {peer}": median(one.own_s for one in costs),
    }
    told = ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in parts.items())
    report.add(
        Row(
            name=f"{name}/cost",
            value=round(100 * share.median, 2),
            unit="% of it",
            target=1.0,
            peer=f"{MOST:.0%}; {told}",
            ratio=round(MOST / share.median, 3),
            spread=share.spread,
        )
    )
    rest, others = (median(one["processor_s"]["rest"] for one in side) for side in (ours, theirs))
    report.add(
        Row(
            name=f"{name}/schedulers",
            value=round(rest, 3),
            unit="processor s",
            peer=f"{peer}: {others:.3f}",
            ratio=round(others / rest, 3),
        )
    )
