"""What the picture of one run, and of several, shows."""

import struct
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from rlhf.metrics.curves import curves_figure, draw_curves
from rlhf.metrics.palette import COLOURS, PHASE_COLOURS, phase_colours
from rlhf.metrics.series import RunSeries

PPO = {
    "reward/mean": [(1, 0.1), (2, 0.3), (3, 0.2)],
    "held_out/solved": [(0, 0.0), (3, 0.5)],
    "kl/ref": [(1, 0.0), (2, 0.1), (3, 0.2)],
    "actor/grad_norm": [(1, 2.0), (2, 1.0), (3, 4.0)],
    "critic/grad_norm": [(1, 5.0), (2, 6.0), (3, 7.0)],
    "time/update/actor_s/mean": [(1, 1.0), (2, 2.0), (3, 3.0)],
    "time/reward_s/mean": [(1, 0.5), (2, 0.5), (3, 0.5)],
    "time/step_s/mean": [(1, 2.0), (2, 3.0), (3, 4.0)],
}
SFT = {
    "sft/loss": [(1, 3.0), (2, 2.0)],
    "sft/grad_norm": [(1, 1.0), (2, 0.5)],
    "time/step_s/mean": [(1, 4.0), (2, 6.0)],
}


def panel(figure: Figure, title: str):
    return next(ax for ax in figure.axes if ax.get_title(loc="left") == title)


def titles(figure: Figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_weight_is_drawn_only_if_it_moves() -> None:
    fixed, steered = (RunSeries("a", {**PPO, "kl/coef": [(1, 0.1), (2, second)]}) for second in (0.1, 0.12))
    assert "Weight of the KL penalty" not in titles(curves_figure([fixed]))
    for runs in ([steered], [fixed, steered]):
        assert "Weight of the KL penalty" in titles(curves_figure(runs))


def test_one_run_shows_its_metrics_with_a_colour_each() -> None:
    figure = curves_figure([RunSeries("a run", PPO)])
    assert titles(figure) == ["Reward", "KL to the reference", "Gradient norm", "Seconds per phase"]
    actor, critic = panel(figure, "Gradient norm").lines
    assert (list(actor.get_xdata()), list(actor.get_ydata())) == ([1, 2, 3], [2.0, 1.0, 4.0])
    assert list(critic.get_ydata()) == [5.0, 6.0, 7.0]
    assert (actor.get_color(), critic.get_color()) == COLOURS[:2]
    assert [text.get_text() for text in panel(figure, "Gradient norm").get_legend().get_texts()] == ["actor", "critic"]
    assert panel(figure, "Gradient norm").get_yscale() == "log"
    held_out = panel(figure, "Reward").lines[1]
    assert (list(held_out.get_xdata()), list(held_out.get_ydata())) == ([0, 3], [0.0, 0.5])
    stacks = {stack.get_label(): stack for stack in panel(figure, "Seconds per phase").collections}
    assert list(stacks) == ["update/actor", "reward", "other"]
    assert to_hex(stacks["update/actor"].get_facecolor()[0]) == PHASE_COLOURS["update/actor"]


def test_a_weight_that_never_changes_is_no_panel() -> None:
    moving = RunSeries("a", {"kl/coef": [(1, 0.1), (2, 0.2)]})
    still = RunSeries("b", {"kl/coef": [(1, 0.1), (2, 0.1)], "kl/ref": [(1, 0.0)]})
    assert titles(curves_figure([still])) == ["KL to the reference"]
    assert titles(curves_figure([moving, still])) == ["KL to the reference", "Weight of the KL penalty"]


def test_shaped_rewards_are_shown_where_they_are_not_the_rewards() -> None:
    same = RunSeries("a", {"reward/mean": [(1, 0.5)], "shaping/mean": [(1, 0.5)]})
    other = RunSeries("b", {"reward/mean": [(1, 0.5)], "shaping/mean": [(1, 0.0)]})
    assert titles(curves_figure([same])) == ["Reward"]
    assert titles(curves_figure([same, other])) == ["Reward", "Reward that is learned from"]


def test_several_runs_of_different_trainers_share_panels_with_a_colour_a_run() -> None:
    figure = curves_figure([RunSeries("ppo", PPO), RunSeries("sft", SFT)])
    assert titles(figure) == [
        "Cross entropy of the answers",
        "Reward",
        "KL to the reference",
        "Gradient norm",
        "Seconds per step, by phase",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ppo, 3 steps", "sft, 2 steps"]
    actor, critic, model = panel(figure, "Gradient norm").lines
    assert (actor.get_color(), critic.get_color(), model.get_color()) == (COLOURS[0], COLOURS[0], COLOURS[1])
    assert len({line.get_linestyle() for line in (actor, critic, model)}) == 3


def test_the_bars_of_several_runs_are_seconds_a_step() -> None:
    ax = panel(curves_figure([RunSeries("ppo", PPO), RunSeries("sft", SFT)]), "Seconds per step, by phase")
    bars = [(round(bar.get_y() + 0.2), bar.get_x(), bar.get_width()) for bar in ax.patches if bar.get_width()]
    assert bars == [(0, 0.0, 2.0), (0, 2.0, 0.5), (0, 2.5, 0.5), (1, 0.0, 5.0)]  # update, reward, other; step


@pytest.mark.parametrize(("smooth", "num_lines"), [(0, 2), (1, 1), (9, 2)])
def test_a_smoothed_line_keeps_the_raw_values_behind_it(smooth: int, num_lines: int) -> None:
    values = [(step, float(step % 2)) for step in range(60)]
    lines = panel(curves_figure([RunSeries("a", {"kl/ref": values})], smooth=smooth), "KL to the reference").lines
    assert len(lines) == num_lines
    assert list(lines[0].get_ydata()) == [value for _, value in values]
    if smooth == 9:  # 5 odd steps of the 9 around an odd one
        assert lines[1].get_ydata()[31] == pytest.approx(5 / 9)


def test_a_few_steps_are_not_smoothed() -> None:
    assert len(panel(curves_figure([RunSeries("a", {"kl/ref": PPO["kl/ref"]})]), "KL to the reference").lines) == 1


def test_phases_keep_their_colours_and_unknown_ones_get_their_own() -> None:
    found = phase_colours(["mine", "reward", "yours"])
    assert found["reward"] == PHASE_COLOURS["reward"]
    assert len({*found.values(), *PHASE_COLOURS.values()}) == len(PHASE_COLOURS) + 2


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_run_of_any_length_is_drawn(tmp_path: Path, num_steps: int) -> None:
    series = {name: points[:num_steps] for name, points in PPO.items()} if num_steps else {}
    picture = tmp_path / "curves.png"
    draw_curves([RunSeries("a run", series)], picture)
    width, height = png_size(picture)
    panels = 4 if num_steps else 1
    assert width == pytest.approx(4.6 * min(3, panels) * 110, abs=2)
    assert height == pytest.approx((2.9 * -(-panels // 3) + 0.5) * 110, abs=2)
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]
