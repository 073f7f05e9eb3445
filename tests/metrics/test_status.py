"""The line that says what a run is doing."""

import pytest

from rlhf.metrics.status import Status, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Ticks:
    """Stands for the progress clock."""

    what = "start"
    idle_s = 0.0


@pytest.fixture
def status(clock):
    return Status(40, clock=clock)


def test_the_first_step_shows_its_phase_and_how_long_it_has_lasted(status, clock):
    assert status.line() == "step 1/40: starting 0 s"
    clock.now = 5
    status.enter("rollout/generate")
    clock.now = 17
    assert status.line() == "step 1/40: rollout/generate 12 s"


def test_what_the_loops_tell_is_shown_beside_the_phase(clock):
    ticks = Ticks()
    status = Status(40, progress=ticks, clock=clock)
    status.enter("rollout/generate")
    ticks.what = "rollout"  # nothing new
    assert status.line() == "step 1/40: rollout/generate 0 s"
    ticks.what = "decoded 120 of 640 tokens"
    assert status.line() == "step 1/40: rollout/generate 0 s, decoded 120 of 640 tokens"


def test_after_a_minute_without_progress_it_says_what_it_waits_for(clock):
    ticks = Ticks()
    status = Status(40, progress=ticks, clock=clock)
    status.enter("experience")
    ticks.what, ticks.idle_s, clock.now = "values of the critic, ranks 4..7", 59.0, 75
    assert "no progress" not in status.line()
    ticks.idle_s = 60.0
    assert status.line() == (
        "step 1/40: experience 1 min 15 s, no progress for 1 min 0 s; waits for values of the critic, ranks 4..7"
    )
    ticks.idle_s = 1.0
    assert "no progress" not in status.line()


def test_without_a_progress_clock_it_waits_for_the_phase(status, clock):
    status.enter("sync")
    clock.now = 60
    assert status.line().endswith("no progress for 1 min 0 s; waits for sync")


def test_a_finished_step_moves_on_and_the_last_one_stays(status):
    status.step_done(1)
    assert status.line().startswith("step 2/40: between phases")
    status.step_done(40)
    assert status.line().startswith("step 40/40")


def test_a_long_phase_is_due_at_30_60_120_seconds(status, clock):
    status.enter("rollout")
    due = []
    for second in range(250):
        clock.now = second
        if status.due():
            due.append(second)
    assert due == [30, 60, 120, 240]
    status.enter("rollout")  # the next one starts anew
    clock.now = 249 + 29
    assert status.due() is None
    clock.now = 249 + 30
    assert status.due() == "step 1/40: rollout 30 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7800, "2 h 10 min")]
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert duration(seconds) == text
