"""The flat names of a step's numbers."""

from dataclasses import fields
from pathlib import Path

from rlhf.metrics.console import COLUMNS
from rlhf.metrics.curves import PANELS
from rlhf.metrics.names import GROUPS, ActorMetrics, RewardMetrics, StepMetrics, metric_docs, time_name
from rlhf.metrics.spread import MinMeanMax

README = Path(__file__).resolve().parents[2] / "rlhf/metrics/README.md"


def test_a_step_is_flattened_by_group_and_field():
    step = StepMetrics(
        reward=RewardMetrics(mean=0.5, std=0.25, min=0, max=1, solved=0.4, failed=2),
        actor=ActorMetrics(
            loss=-0.1, entropy=1.5, clip_fraction=0.01, grad_norm=3.0, clip_factor=0.33, lr=1e-6, skipped_steps=0
        ),
        time={"rollout": MinMeanMax(1.0, 2.0, 4.0, 1, 3), "rollout/generate": MinMeanMax(0.5, 0.75, 1.0, 0, 3)},
    )
    assert step.flatten() == {
        "reward/mean": 0.5,
        "reward/std": 0.25,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/solved": 0.4,
        "reward/failed": 2.0,
        "actor/loss": -0.1,
        "actor/entropy": 1.5,
        "actor/clip_fraction": 0.01,
        "actor/grad_norm": 3.0,
        "actor/clip_factor": 0.33,
        "actor/lr": 1e-6,
        "actor/skipped_steps": 0.0,
        "time/rollout_s/min": 1.0,
        "time/rollout_s/mean": 2.0,
        "time/rollout_s/max": 4.0,
        "time/rollout/generate_s/min": 0.5,
        "time/rollout/generate_s/mean": 0.75,
        "time/rollout/generate_s/max": 1.0,
    }


def test_an_empty_step_has_no_numbers():
    assert StepMetrics().flatten() == {}


def test_every_number_has_a_meaning_and_stands_in_the_readme():
    docs, text = metric_docs(), README.read_text()
    assert set(docs) == {f"{group}/{f.name}" for group, cls in GROUPS.items() for f in fields(cls)}
    for name, doc in docs.items():
        assert f"| `{name}` | {doc} |" in text, name


def test_table_and_curves_show_names_that_exist():
    known = set(metric_docs()) | {time_name("step")}
    assert {column.metric for column in COLUMNS} <= known
    assert {name for panel in PANELS for name, _ in panel.lines + panel.points} <= known
