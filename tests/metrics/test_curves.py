"""Reading metrics.jsonl and drawing it."""

import json
import struct

import pytest

from rlhf.metrics.curves import draw_curves, phase_seconds, read_metrics, smoothed


def write(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def png_size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_null_values_and_a_line_cut_short_are_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [{"step": 1, "a": 1.0, "b": None}, {"step": 2, "a": 3.0, "b": 2.0}])
    path.write_text(path.read_text() + '{"step": 3, "a": 4.')
    assert read_metrics(path) == {"a": [(1, 1.0), (2, 3.0)], "b": [(2, 2.0)]}


def test_phases_that_hold_no_other_are_stacked_with_the_rest_of_the_step():
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


def test_smoothing_is_a_centred_mean():
    assert smoothed([0.0, 3.0, 6.0, 0.0], 1) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([5.0], 3) == [5.0]
    assert smoothed([2.0, 4.0], 0) == [2.0, 4.0]


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_a_run_of_any_length_is_drawn(tmp_path, num_steps):
    write(
        tmp_path / "m.jsonl",
        [
            {
                "step": step,
                "reward/mean": step / 60,
                "kl/ref": 0.0,
                "actor/grad_norm": 0.0 if step == 1 else 2.0,
                "mismatch/max": 1e-6,
                "time/rollout_s/mean": 2.0,
                "time/update_s/mean": 1.0,
                **({"held_out/solved": 0.5} if step in (1, 60) else {}),
            }
            for step in range(1, num_steps + 1)
        ],
    )
    picture = tmp_path / "curves.png"
    draw_curves(tmp_path / "m.jsonl", picture, title="a run")
    width, height = png_size(picture)
    panels = 5 if num_steps else 1
    assert width == pytest.approx(4.6 * min(3, panels) * 110, abs=2)
    assert height == pytest.approx((2.9 * -(-panels // 3) + 0.5) * 110, abs=2)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
