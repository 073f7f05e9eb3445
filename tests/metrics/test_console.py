"""What is drawn on a terminal and what is printed elsewhere, on a recorded console."""

import io
import sys

import pytest
from rich.console import Console

from rlhf.errors import ConfigError
from rlhf.metrics.console import LiveDisplay, PlainDisplay, open_display
from rlhf.metrics.status import Status

STEP = {
    "reward/mean": 0.4125,
    "kl/ref": 0.00321,
    "length/response_mean": 12.34,
    "actor/grad_norm": 1.5,
    "mismatch/max": 3.2e-6,
    "rate/tokens_per_s": 12345.6,
    "time/step_s/mean": 8.914,
    "critic/loss": 0.7,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(*, force: bool = True, width: int = 110) -> Console:
    return Console(file=io.StringIO(), force_terminal=force, width=width, height=40, color_system=None)


def rendered(display: LiveDisplay) -> str:
    """What the display draws at this moment."""
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(display)
    return console.file.getvalue()


def test_a_run_that_goes_on_counts_from_the_steps_that_are_done():
    status = Status(40, clock=Clock())
    for display in (PlainDisplay(terminal(), status), LiveDisplay(terminal(), status)):
        display.goes_on(7 + status.step)
        display.enter("rollout")
        assert status.line() == f"step {status.step + 1}/40: rollout 0 s"
    assert status.step == 14


def test_the_table_holds_the_last_eight_steps_and_the_phase_below():
    clock = Clock()
    display = LiveDisplay(terminal(), Status(40, clock=clock))
    with display:
        display.enter("rollout/generate")
        clock.now = 12
        first = rendered(display)
        assert "step 1/40: rollout/generate 12 s" in first
        assert "reward" not in first  # no table before the first step has ended
        for step in range(1, 11):
            display.write(step, {**STEP, "reward/mean": step / 10})
        display.enter("update/actor")
        text = rendered(display)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["step", "reward", "KL", "length", "grad", "norm", "mismatch", "tok/s", "s/step"]
    assert [line[0] for line in lines[1:9]] == [f"{step}/40" for step in range(3, 11)]
    assert lines[8] == ["10/40", "1.000", "3.2e-03", "12.3", "1.50", "3.2e-06", "12,346", "8.91"]
    assert "step 11/40: update/actor 0 s" in text


def test_a_quiet_minute_shows_on_the_live_line():
    clock = Clock()
    display = LiveDisplay(terminal(), Status(40, clock=clock))
    with display:
        display.enter("rollout/generate")
        clock.now = 61
        assert "no progress for 1 min 1 s; waits for rollout/generate" in " ".join(rendered(display).split())


def test_columns_follow_the_metrics_and_numbers_that_are_not_finite_show():
    display = LiveDisplay(terminal(), Status(3, clock=Clock()))
    with display:
        display.write(1, {"sft/loss": float("nan"), "sft/grad_norm": float("inf")})
        text = rendered(display)
    assert text.splitlines()[0].split() == ["step", "loss", "grad", "norm"]
    assert text.splitlines()[1].split() == ["1/3", "nan", "inf"]


def test_the_terminal_is_left_clean_when_the_run_fails():
    console = terminal()
    display = LiveDisplay(console, Status(40, clock=Clock()))

    def run() -> None:
        with display:
            display.note("loaded [bold]7[/bold] :tensors: :smile:")
            display.write(1, STEP)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    written = console.file.getvalue()
    assert "loaded [bold]7[/bold] :tensors: :smile:" in written  # shown as it is, not as markup
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # cursor shown after it was hidden
    last = written.splitlines()[-2:]
    assert "1/40" in last[0]  # the table stays, the status line does not
    assert last[1].strip() == "\x1b[?25h"
    display.close()  # a second time does nothing
    assert console.file.getvalue() == written


def test_the_cursor_is_never_left_hidden_by_a_kill():
    console = terminal()
    display = LiveDisplay(console, Status(40, clock=Clock()))
    with display:
        written = console.file.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_elsewhere_each_step_is_one_plain_line():
    console = terminal(force=False)
    with PlainDisplay(console, Status(40, clock=Clock())) as display:
        display.enter("rollout")
        display.write(1, STEP)
        display.note("saved runs/x/checkpoints/1")
    assert console.file.getvalue() == (
        "step 1/40  reward 0.412  KL 3.2e-03  length 12.3  grad norm 1.50  mismatch 3.2e-06  tok/s 12,346  "
        "s/step 8.91\nsaved runs/x/checkpoints/1\n"
    )


def test_elsewhere_a_long_phase_gets_a_line():
    clock, console = Clock(), terminal(force=False)
    display = PlainDisplay(console, Status(40, clock=clock))
    display.enter("rollout/generate")
    clock.now = 29
    display.poll()
    assert console.file.getvalue() == ""
    clock.now = 31
    display.poll()
    display.poll()
    assert console.file.getvalue() == "step 1/40: rollout/generate 31 s\n"


def test_the_watcher_prints_by_itself_and_stops(monkeypatch):
    import threading

    from rlhf.metrics import console as module

    monkeypatch.setattr(module, "POLL_S", 0.01)
    clock, console, seen = Clock(), terminal(force=False), threading.Event()
    clock.now = 0.0
    display = PlainDisplay(console, Status(40, clock=clock))
    poll = display.poll
    display.poll = lambda: (poll(), "starting" in console.file.getvalue() and seen.set())
    with display:
        clock.now = 45.0
        assert seen.wait(20)
    assert console.file.getvalue() == "step 1/40: starting 45 s\n"
    assert not any(thread.name == "console" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("mode", "force", "kind"),
    [
        ("auto", True, LiveDisplay),
        ("auto", False, PlainDisplay),
        ("plain", True, PlainDisplay),
        ("live", False, LiveDisplay),
    ],
)
def test_the_kind_of_display_follows_mode_and_terminal(mode, force, kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display(mode, 3, console=terminal(force=force)), kind)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"log\.console: 'loud' given"):
        open_display("loud", 3)


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_display_that_began_with_the_loading_goes_on_when_the_loop_begins(mode):
    console = terminal(force=mode == "live")
    with open_display(mode, 3, console=console) as display, display:
        display.write(1, STEP)
    assert "1/3" in console.file.getvalue()


def test_what_libraries_warn_of_stays_out_of_the_live_table():
    console = terminal()
    before = sys.stderr
    with LiveDisplay(console, Status(40, clock=Clock())):
        assert sys.stderr is before  # which a job has turned to the rank's log
    assert sys.stderr is before
