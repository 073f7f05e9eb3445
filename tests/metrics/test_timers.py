"""Phases on one rank, by a clock that the test moves."""

import pytest

from rlhf.metrics.timers import Interval, Kind, Timers, no_span


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_inside_another_counts_in_both():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers.phase("rollout"):
        clock.now += 1
        with timers.phase("rollout/generate"):
            clock.now += 4
        with timers.phase("rollout/generate"):
            clock.now += 2
    assert timers.drain() == {"rollout/generate": 6.0, "rollout": 7.0}


def test_a_recording_keeps_phases_and_spans_with_their_depth():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers.recording() as kept, timers.phase("a"):
        clock.now += 1
        with timers.span("rows", Kind.WAIT), timers.phase("a/b"):
            clock.now += 2
        with timers.span("pack"):
            clock.now += 4
    assert kept == [
        Interval("a/b", 101.0, 103.0, Kind.PHASE, 2),
        Interval("rows", 101.0, 103.0, Kind.WAIT, 1),
        Interval("pack", 103.0, 107.0, Kind.WORK, 1),
        Interval("a", 100.0, 107.0, Kind.PHASE, 0),
    ]
    assert timers.drain() == {"a/b": 2.0, "a": 7.0}  # spans are no metrics


def test_nothing_is_kept_outside_a_recording():
    timers = Timers()
    with timers.recording() as kept:
        pass
    with timers.phase("a"), timers.span("x"):
        pass
    assert kept == []
    with no_span("x"):
        pass


def test_drain_takes_each_second_once_and_leaves_open_phases_for_later():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers.phase("step"):
        with timers.phase("a"):
            clock.now += 3
        assert timers.drain() == {"a": 3.0}
        clock.now += 5
    assert timers.drain() == {"step": 8.0}
    assert timers.drain() == {}


def test_a_phase_inside_itself_counts_once():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers.phase("score"), timers.phase("score"):
        clock.now += 2
    assert timers.drain() == {"score": 2.0}


def test_entering_and_leaving_are_told():
    told = []
    timers = Timers(on_enter=told.append)
    with timers.phase("a"):
        assert timers.current == "a"
        with timers.phase("a/b"):
            assert timers.current == "a/b"
    assert timers.current == ""
    assert told == ["a", "a/b", "a", ""]


def test_a_phase_that_raises_is_timed_and_closed():
    clock = Clock()
    timers = Timers(clock=clock)

    def run() -> None:
        with timers.phase("a"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert timers.current == ""
    assert timers.drain() == {"a": 1.0}


def test_the_default_clock_never_falls_and_is_the_machines():
    import time

    timers = Timers()
    before = time.monotonic()
    with timers.recording() as kept, timers.phase("a"):
        pass
    (interval,) = kept
    assert before <= interval.start <= interval.stop <= time.monotonic()
