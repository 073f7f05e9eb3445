"""The numbers of a run over its steps, read from its metrics.jsonl. Knows no picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import DataError
from rlhf.metrics.names import time_name
from rlhf.metrics.run_folder import RunFolder

BRACKETS = {"step", "training"}  # phases that hold phases of other names
OUTSIDE_STEP = {"evaluate", "save", "profile"}

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class RunSeries:
    """All metrics of one run."""

    label: str
    """What the run is called in a legend."""
    metrics: Mapping[str, Points]
    """(step, value) pairs of each metric, ascending; nulls are left out."""

    @property
    def num_steps(self) -> int:
        """Steps done so far; the evaluation before the first is none."""
        return max((points[-1][0] for points in self.metrics.values()), default=0)


def read_metrics(path: Path) -> dict[str, Points]:
    """(step, value) pairs of each metric in a metrics.jsonl.

    Nulls, what else is no finite number, and lines cut short by a crash are left out; of two lines of one step (a run
    that went on from a checkpoint) the later counts.
    """
    found: dict[str, dict[int, float]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict) or "step" not in line:
            continue
        step = line.pop("step")
        if not isinstance(step, int):
            continue
        for name, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[step] = value
    return {name: sorted(points.items()) for name, points in found.items()}


def read_runs(folders: Sequence[Path]) -> list[RunSeries]:
    """Runs by their folders; their labels are the shortest ends of the paths that tell them apart.

    Raises:
        DataError: A folder has no metrics.jsonl, or no step stands in it.
    """
    runs = []
    for folder, label in zip(folders, labels_of(folders), strict=True):
        path = RunFolder(folder).metrics
        if not path.is_file():
            raise DataError(f"{folder}: no metrics.jsonl; needs the folder of a run; give one such as runs/NAME")
        metrics = read_metrics(path)
        if not metrics:
            raise DataError(f"{path}: no step is written in it; needs a run that has made one; wait for it, see logs/")
        runs.append(RunSeries(label, metrics))
    return runs


def labels_of(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other one has; the same for one given twice."""
    parts = [folder.absolute().parts for folder in folders]
    different, depth = len(set(parts)), 1
    while len({of[-depth:] for of in parts}) < different:
        depth += 1
    return ["/".join(of[-depth:]) for of in parts]


def phase_seconds(metrics: Mapping[str, Points]) -> dict[str, Points]:
    """Mean seconds over the ranks of each phase that holds no other, longest first, then the rest of the step.

    A step that has no phases is one itself.
    """
    prefix, suffix = time_name("|").split("|")
    names = [name for name in metrics if name.startswith(prefix) and name.endswith(suffix)]
    phases = {name.removeprefix(prefix).removesuffix(suffix): metrics[name] for name in names}
    holders = {phase.partition("/")[0] for phase in phases if "/" in phase} | BRACKETS
    leaves = {phase: points for phase, points in phases.items() if phase not in holders}
    ordered = dict(sorted(leaves.items(), key=lambda item: -sum(value for _, value in item[1])))
    inside = [dict(points) for phase, points in leaves.items() if phase not in OUTSIDE_STEP]
    rest = [(step, max(0.0, s - sum(part.get(step, 0.0) for part in inside))) for step, s in phases.get("step", ())]
    if not any(inside):
        return {**ordered, "step": phases["step"]} if "step" in phases else ordered
    return {**ordered, "other": rest} if rest else ordered


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean over each value and up to `reach` values on either side of it."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]
