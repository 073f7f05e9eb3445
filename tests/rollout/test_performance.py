"""The monitor's numbers against a count by hand, and against one tick by tick."""

import pickle
from fractions import Fraction
from math import ceil, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rollout.performance import PerformanceMonitor
from rlhf.rollout.performance_window import combined


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def monitor(clock: Clock) -> PerformanceMonitor:
    return PerformanceMonitor(clock)


def test_one_row_by_hand(monitor: PerformanceMonitor, clock: Clock) -> None:
    """Opened at 10; handed in at 11, begun at 13, first token at 14, 21 tokens at 24; closed at 30."""
    clock.now = 10.0
    monitor.start()
    for at, tell in ((11.0, monitor.submitted), (13.0, monitor.begun), (14.0, monitor.first_token)):
        clock.now = at
        tell([7])
    clock.now = 24.0
    monitor.ended(7, prompt_tokens=40, cached_tokens=30, response_tokens=21)
    clock.now = 30.0
    monitor.stop()
    clock.now = 99.0  # after the window
    found = monitor.stats()
    assert (found.rows, found.seconds) == (1, 20.0)
    assert (found.latency_p50_s, found.latency_p95_s) == (13.0, 13.0)
    assert (found.first_token_p50_s, found.queue_p95_s) == (3.0, 2.0)
    assert found.queue_mean == pytest.approx(2 / 20)
    assert found.queue_max == 1
    assert found.prefill_tokens_per_s == 10 / 1
    assert found.decode_tokens_per_s == 20 / 10
    assert found.utilisation == pytest.approx(11 / 20)
    assert (found.busy_spread, found.running_mean) == (1.0, 1.0)
    assert found.cache_hits == 0.75


def test_a_window_without_rows_has_no_latency_and_an_idle_engine(monitor: PerformanceMonitor, clock: Clock) -> None:
    clock.now = 5.0
    found = monitor.stats()
    assert found.rows == 0
    assert isnan(found.latency_p50_s)
    assert isnan(found.decode_tokens_per_s)
    assert (found.utilisation, found.queue_mean, found.queue_max, found.busy_spread) == (0.0, 0.0, 0, 1.0)


def test_what_is_told_first_counts_and_gaps_are_filled(monitor: PerformanceMonitor, clock: Clock) -> None:
    """A pool hands in at 1 what its engine hands in at 4; a row that is only ended took no time."""
    monitor.submitted(["a"], at=1.0)
    monitor.submitted(["a"], at=4.0)
    monitor.begun(["a"], at=5.0)
    monitor.begun(["a"], at=6.0)
    monitor.ended("a", prompt_tokens=3, response_tokens=2, at=8.0)
    monitor.ended("b", prompt_tokens=3, response_tokens=0, at=8.0)
    clock.now = 10.0
    seen = monitor.window()
    assert seen.queue_s.tolist() == [4.0, 0.0]
    assert seen.latency_s.tolist() == [7.0, 0.0]
    assert np.isnan(seen.first_token_s).all()
    assert isnan(seen.stats.prefill_tokens_per_s)  # no first token is known


def test_rows_under_way_are_counted_and_belong_to_the_window_they_end_in(
    monitor: PerformanceMonitor, clock: Clock
) -> None:
    monitor.submitted(range(5))
    monitor.begun([0, 1])
    monitor.forget([4, 17])
    assert (monitor.waiting, monitor.running) == (2, 2)
    clock.now = 10.0
    seen = monitor.stats()
    assert (seen.rows, seen.utilisation, seen.running_mean, seen.queue_mean, seen.queue_max) == (0, 1.0, 2.0, 2.0, 2)
    monitor.start()
    clock.now = 14.0
    monitor.ended(0, prompt_tokens=1, response_tokens=1)
    seen = monitor.stats()
    assert (seen.rows, seen.latency_p50_s) == (1, 14.0)
    assert seen.utilisation == 1.0
    assert seen.running_mean == 2.0


def test_tokens_from_before_the_window_are_not_made_in_it(monitor: PerformanceMonitor, clock: Clock) -> None:
    """Two rows at 10 tokens a second each: whenever a window opens, the engine has made 20 a second in it."""
    monitor.begun(["a", "b"], at=0.0)
    monitor.first_token(["a", "b"], at=8.0)
    clock.now = 18.0
    monitor.start()
    monitor.ended("a", prompt_tokens=80, response_tokens=121, at=20.0)
    monitor.ended("b", prompt_tokens=80, response_tokens=121, at=20.0)
    clock.now = 20.0
    seen = monitor.window()
    assert (seen.response_tokens, seen.decode_tokens, seen.decode_s) == (242, pytest.approx(2 * 20), 2.0)
    assert seen.stats.decode_tokens_per_s == pytest.approx(20)
    assert (seen.prefill_tokens, seen.prefill_s) == (0, 0)
    assert isnan(seen.stats.prefill_tokens_per_s)


def test_the_context_manager_closes_the_window_also_when_it_fails(monitor: PerformanceMonitor, clock: Clock) -> None:
    def fails() -> None:
        with monitor.measuring():
            clock.now = 3.0
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fails()
    clock.now = 8.0
    assert monitor.stats().seconds == 3.0


ROWS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(0, 9),
        st.integers(0, 6),
        st.integers(0, 20),
        st.integers(1, 50),
        st.integers(0, 9),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS, st.integers(0, 20), st.integers(25, 60))
def test_numbers_are_those_of_a_count_tick_by_tick(rows, opened: int, closed: int) -> None:
    clock = Clock()
    monitor = PerformanceMonitor(clock)
    clock.now = opened
    monitor.start()
    times = []
    for row, (submitted, wait, prefill, decode, prompt, cached, response) in enumerate(rows):
        begun, first = submitted + wait, submitted + wait + prefill
        times.append((submitted, begun, first, first + decode))
        monitor.submitted([row], at=submitted)
        monitor.begun([row], at=begun)
        monitor.first_token([row], at=first)
        monitor.ended(
            row, prompt_tokens=prompt + cached, cached_tokens=cached, response_tokens=response, at=first + decode
        )
    clock.now = closed
    monitor.stop()
    found = monitor.stats()

    def of_window(tokens: int, start: int, stop: int) -> Fraction:
        """As many in each tick."""
        if start == stop:
            return Fraction(tokens if opened <= start <= closed else 0)
        ticks = len(set(range(start, stop)) & set(range(opened, closed)))
        return Fraction(tokens, stop - start) * ticks

    def at_each_tick(start: int, stop: int) -> list[int]:
        return [sum(one[start] <= tick < one[stop] for one in times) for tick in range(opened, closed)]

    waiting, running = at_each_tick(0, 1), at_each_tick(1, 3)
    busy = sum(map(bool, running))
    assert found.queue_mean == pytest.approx(sum(waiting) / len(waiting))
    assert found.queue_max == max(waiting)
    assert found.utilisation == pytest.approx(busy / (closed - opened))
    assert found.running_mean == pytest.approx(sum(running) / busy if busy else 0.0)
    ticks = sum(map(bool, at_each_tick(1, 2))), sum(map(bool, at_each_tick(2, 3)))
    tokens = [
        sum(of_window(count, one[start], one[start + 1]) for count, one in zip(counts, times, strict=True))
        for counts, start in (([row[4] for row in rows], 1), ([max(0, row[6] - 1) for row in rows], 2))
    ]
    wanted = [float(count) / spent if spent else nan for count, spent in zip(tokens, ticks, strict=True)]
    assert [found.prefill_tokens_per_s, found.decode_tokens_per_s] == pytest.approx(wanted, nan_ok=True)
    latencies = sorted(end - submitted for submitted, *_, end in times)
    assert found.latency_p50_s == pytest.approx(between(latencies, 0.5))
    assert found.latency_p95_s == pytest.approx(between(latencies, 0.95))


def between(ordered: list[int], share: float) -> float:
    """The value at a share of the way from the least to the greatest, on the line between its neighbours."""
    place = share * (len(ordered) - 1)
    low = ordered[int(place)]
    return low + (ordered[min(ceil(place), len(ordered) - 1)] - low) * (place - int(place))


def test_engines_add_up_to_one_by_rows_rates_and_busy_times() -> None:
    """One is busy for 8 of 10 ticks, the other for 4; 90 rows of latency 2 and 10 of latency 4."""
    windows = []
    for count, begun, ended in ((90, 0.0, 2.0), (10, 0.0, 4.0)):
        clock = Clock()
        monitor = PerformanceMonitor(clock)
        monitor.submitted(range(count), at=0.0)
        for row in range(count):
            monitor.begun([row], at=begun)
            monitor.first_token([row], at=1.0)
            monitor.ended(row, prompt_tokens=10, cached_tokens=5, response_tokens=11, at=ended)
        monitor.begun(["more"], at=2.0)
        monitor.ended("more", prompt_tokens=0, response_tokens=0, at=8.0 if count == 90 else 4.0)
        clock.now = 10.0
        windows.append(pickle.loads(pickle.dumps(monitor.window())))
    found = combined(windows)
    assert found.rows == 102
    assert found.latency_p50_s == 2.0
    assert found.latency_p95_s == 4.0
    assert found.utilisation == pytest.approx((0.8 + 0.4) / 2)
    assert found.busy_spread == pytest.approx(8 / 6)
    assert found.prefill_tokens_per_s == pytest.approx(90 * 5 / 1 + 10 * 5 / 1)
    assert found.decode_tokens_per_s == pytest.approx(90 * 10 / 1 + 10 * 10 / 3)
    assert found.cache_hits == 0.5
