"""What a run has done before this start of it, read from its folder: a resume goes on from there."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from rlhf.metrics.names import HeldOutMetrics
from rlhf.metrics.run_folder import RunFolder, SampleRecord
from rlhf.metrics.series import Points, read_metrics

BEFORE = ("held_out/", "clock/")
"""Begins the names of all that is written down before the first step."""

HELD_OUT = {f.name: f"held_out/{f.name}" for f in fields(HeldOutMetrics)}


@dataclass(frozen=True, slots=True)
class HeldOutRecord:
    """An evaluation as it was written down."""

    metrics: HeldOutMetrics
    samples: tuple[SampleRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierPart:
    """The steps before this start; of a run that begins, none."""

    steps: int = 0
    """The last of them."""
    seconds: float = 0.0
    """Wall-clock seconds that they took, as in the metric clock/seconds."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step of the record; NaN where none is known. Empty where none has any, as losses."""
    losses: tuple[float, ...] = ()
    """Loss of each step of fine-tuning."""
    before: HeldOutRecord | None = None
    """The evaluation before the first step."""
    after: HeldOutRecord | None = None
    """The last one after a step."""

    @staticmethod
    def read(folder: RunFolder, last_step: int | None) -> "EarlierPart":
        """Of a folder that goes on after a step (`RunFolder.open` has cut it); None: of a run that begins."""
        if last_step is None:
            return EarlierPart()
        metrics = read_metrics(folder.metrics) if folder.metrics.exists() else {}
        evaluations, seconds = _evaluations(metrics), dict(metrics.get("clock/seconds", ()))
        begun = _begun(metrics)
        last = max(evaluations, default=begun)
        samples = _held_out_samples(folder)
        found = {
            step: HeldOutRecord(evaluations[step], tuple(sample for sample in samples if sample.step == step))
            for step in evaluations.keys() & {begun, last}
        }
        return EarlierPart(
            steps=last_step,
            seconds=seconds[max(seconds)] if seconds else 0.0,
            rewards=_by_step(metrics.get("reward/mean", ()), begun, last_step),
            losses=_by_step(metrics.get("sft/loss", ()), begun, last_step),
            before=found.get(begun),
            after=found[last] if last > begun else None,
        )


def _evaluations(metrics: Mapping[str, Points]) -> dict[int, HeldOutMetrics]:
    """By step, of those that have all their numbers."""
    columns = {name: dict(metrics.get(metric, ())) for name, metric in HELD_OUT.items()}
    steps = set.intersection(*(set(column) for column in columns.values()))
    return {step: HeldOutMetrics(**{name: column[step] for name, column in columns.items()}) for step in steps}


def _begun(metrics: Mapping[str, Points]) -> int:
    """The step after which the record begins: 0, or that of another run's checkpoint."""
    names: dict[int, set[str]] = {}
    for name, points in metrics.items():
        for step, _ in points:
            names.setdefault(step, set()).add(name)
    first = min(names, default=0)
    is_before = all(name.startswith(BEFORE) for name in names.get(first, ()))
    return first if is_before or first == 0 else first - 1


def _by_step(points: Points, begun: int, last_step: int) -> tuple[float, ...]:
    of_step = dict(points)
    return tuple(of_step.get(step, math.nan) for step in range(begun + 1, last_step + 1)) if of_step else ()


def _held_out_samples(folder: RunFolder) -> list[SampleRecord]:
    if not folder.samples.exists():
        return []
    names, found = {f.name for f in fields(SampleRecord)}, []
    with folder.samples.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = json.loads(line)
            if record.get("split") != "held_out" or not names <= record.keys():
                continue
            reward = math.nan if record["reward"] is None else record["reward"]
            found.append(SampleRecord(**{**{name: record[name] for name in names}, "reward": reward}))
    return found
