"""The text that ends a run."""

import math
from pathlib import Path

from rlhf.metrics.report import BeforeAfter, FinalReport
from rlhf.metrics.sparkline import sparkline


def test_the_report_says_what_was_learnt_and_what_to_do_next():
    report = FinalReport(
        run_folder=Path("runs/quickstart"),
        steps=3,
        seconds=185.2,
        solved_before=0.5,
        solved_after=0.75,
        problems=200,
        rewards=[0.0, 0.5, 1.0],
        samples=[BeforeAfter(prompt="3 + 4 =\n", before="8", before_reward=0.01, after="7", after_reward=1.0)] * 4,
        next_command="./scripts/launch.sh x",
    )
    # standard error: sqrt((0.25 + 0.1875) / 200) = 0.0468
    assert report.text().splitlines() == [
        "3 steps in 3 min 5 s",
        "solved of 200 held-out problems  50.0% before, 75.0% after (+25.0 points, standard error 4.7)",
        "reward by step  0.000 ▁▅█ 1.000  (first, last)",
        *[
            line
            for number in (1, 2, 3)
            for line in (f"sample {number}   3 + 4 =", "  before   8   reward 0.01", "  after    7   reward 1")
        ],
        "run folder  runs/quickstart",
        "try next    ./scripts/launch.sh x",
    ]


def test_what_was_not_measured_is_left_out():
    report = FinalReport(run_folder=Path("runs/sft"), steps=10, seconds=4.0)
    assert report.text() == "10 steps in 4 s\nrun folder  runs/sft"


def test_fine_tuning_reports_its_loss_and_where_the_model_is():
    report = FinalReport(run_folder=Path("runs/sft"), steps=2, seconds=4.0, losses=[3.0, 1.0], model="m/hf")
    assert report.text().splitlines()[1:] == [
        "loss by step  3.000 █▁ 1.000  (first, last)",
        "model       m/hf",
        "run folder  runs/sft",
    ]


def test_a_sample_stays_on_one_line_and_cannot_move_the_cursor():
    sample = BeforeAfter(prompt="a\nb", before="\x1b[2J" + "x" * 300, before_reward=0, after="", after_reward=0)
    text = FinalReport(run_folder=Path("r"), steps=1, seconds=1, samples=[sample]).text()
    assert "sample 1   a\\nb" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 130


def test_a_long_prompt_is_cut_where_its_template_begins():
    prompt = "<|system|>\n" + "You are a calculator. " * 10 + "<|user|>\n3 * 9 =<|assistant|>\n"
    sample = BeforeAfter(prompt=prompt, before="2", before_reward=0.0, after="27", after_reward=1.0)
    first = FinalReport(run_folder=Path("runs/x"), steps=1, seconds=1.0, samples=[sample]).text().splitlines()[1]
    assert first.startswith("sample 1   ... ")
    assert first.endswith(r"<|user|>\n3 * 9 =<|assistant|>")
    assert len(first) == len("sample 1   ") + 100


def test_sparkline_spans_least_to_greatest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([]) == ""


def test_a_long_sparkline_averages_neighbours():
    line = sparkline([0.0, 0.0, 2.0, 2.0, 4.0, 4.0, math.nan, math.nan], width=4)
    assert line == "▁▅█ "
    assert len(sparkline(range(1000), width=60)) == 60
