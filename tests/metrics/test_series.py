"""Reading metrics.jsonl, and what is made of it."""

import json
from pathlib import Path

import pytest

from rlhf.errors import DataError
from rlhf.metrics.series import labels_of, phase_seconds, read_metrics, read_runs, smoothed


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_null_values_and_a_line_cut_short_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, [{"step": 1, "a": 1.0, "b": None}, {"step": 2, "a": 3.0, "b": 2.0}])
    path.write_bytes(path.read_bytes() + b'{"step": 3, "a": 4.\xc3')
    assert read_metrics(path) == {"a": [(1, 1.0), (2, 3.0)], "b": [(2, 2.0)]}


def test_what_is_no_finite_number_at_a_whole_step_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    odd = ['{"step": null, "a": 1}', '{"step": "x", "a": 2}', "[1]", "5"]
    odd += [f'{{"step": 3, "a": {value}, "b": 1}}' for value in ("NaN", "Infinity", '"text"', '{"c": 1}')]
    path.write_text("\n".join(['{"step": 1, "a": 7}', *odd]))
    assert read_metrics(path) == {"a": [(1, 7)], "b": [(3, 1)]}


def test_of_two_lines_of_a_step_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, [{"step": step, "a": value} for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0))])
    assert read_metrics(path) == {"a": [(1, 1.0), (2, 5.0), (3, 3.0)]}


def test_a_folder_without_steps_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing: no metrics\.jsonl; needs the folder of a run"):
        read_runs([tmp_path / "nothing"])
    write(tmp_path / "empty" / "metrics.jsonl", [])
    with pytest.raises(DataError, match=r"empty/metrics\.jsonl: no step is written"):
        read_runs([tmp_path / "empty"])


def test_runs_know_their_last_step(tmp_path: Path) -> None:
    write(tmp_path / "a" / "metrics.jsonl", [{"step": 0, "held_out/solved": 0.5}, {"step": 7, "x": 1.0}])
    (run,) = read_runs([tmp_path / "a"])
    assert (run.label, run.num_steps) == ("a", 7)


def test_labels_are_the_shortest_ends_that_tell_runs_apart() -> None:
    assert labels_of([Path("/x/a"), Path("/y/b")]) == ["a", "b"]
    assert labels_of([Path("/x/runs/a"), Path("/y/runs/a"), Path("/y/runs/b")]) == ["x/runs/a", "y/runs/a", "y/runs/b"]
    assert labels_of([Path("/x/a"), Path("/x/a")]) == ["a", "a"]


def test_phases_that_hold_no_other_are_stacked_with_the_rest_of_the_step() -> None:
    series = {
        "time/reward_s/mean": [(1, 1.0), (2, 1.0)],
        "time/rollout_s/mean": [(1, 5.0), (2, 5.0)],
        "time/rollout_s/max": [(1, 6.0), (2, 6.0)],
        "time/rollout/generate_s/mean": [(1, 4.0), (2, 4.0)],
        "time/training_s/mean": [(1, 2.0), (2, 2.0)],
        "time/update/actor_s/mean": [(1, 1.5), (2, 1.5)],
        "time/evaluate_s/mean": [(2, 7.0)],
        "time/step_s/mean": [(1, 9.0), (2, 6.0)],
        "reward/mean": [(1, 0.5)],
    }
    assert list(phase_seconds(series).items()) == [
        ("rollout/generate", [(1, 4.0), (2, 4.0)]),
        ("evaluate", [(2, 7.0)]),
        ("update/actor", [(1, 1.5), (2, 1.5)]),
        ("reward", [(1, 1.0), (2, 1.0)]),
        ("other", [(1, 2.5), (2, 0.0)]),  # overlapping phases may exceed the step, the rest is never negative
    ]


def test_a_step_without_phases_is_one() -> None:
    series = {"time/step_s/mean": [(1, 9.0)], "time/save_s/mean": [(1, 2.0)]}
    assert phase_seconds(series) == {"save": [(1, 2.0)], "step": [(1, 9.0)]}
    assert phase_seconds({}) == {}


def test_smoothing_is_a_centred_mean() -> None:
    assert smoothed([0.0, 3.0, 6.0, 0.0], 1) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([5.0], 3) == [5.0]
    assert smoothed([2.0, 4.0], 0) == [2.0, 4.0]
