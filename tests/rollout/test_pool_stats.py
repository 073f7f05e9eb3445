"""Numbers of a call, by hand."""

import numpy as np
import pytest

from rlhf.rollout.pool_stats import PoolPart, PoolStats


def part(waits: list[float], busy_s: float, **counts: int) -> PoolPart:
    numbers = {"tokens": 0, "moved": 0, "slot_tokens": 0, "wasted_tokens": 0} | counts
    return PoolPart(np.array(waits, dtype=np.float32), busy_s, **numbers)


def test_parts_of_engines_add_up():
    parts = [
        part([0.0, 0.0, 4.0], 6.0, tokens=30, moved=1, slot_tokens=40, wasted_tokens=10),
        part([2.0], 3.0, tokens=10, moved=2, slot_tokens=60, wasted_tokens=20),
        part([], 0.0),  # took no part
    ]
    found = PoolStats.of(parts, engines=2, lost_engines=1)
    assert (found.engines, found.lost_engines, found.rows, found.moved) == (2, 1, 4, 3)
    assert found.mean_response_tokens == 40 / 4
    assert found.queue_time_p50_s == 1.0  # between 0 and 2
    assert found.queue_time_p95_s == pytest.approx(2.0 + 0.85 * 2.0)  # at 0.95 * 3 = 2.85 of the sorted 0 0 2 4
    assert found.busy_spread == pytest.approx(6.0 / 4.5)
    assert found.padding_waste == 30 / 100


def test_a_call_without_rows_has_numbers_too():
    found = PoolStats.of([part([], 0.0)], engines=1, lost_engines=0)
    assert (found.rows, found.mean_response_tokens, found.queue_time_p95_s) == (0, 0.0, 0.0)
    assert (found.busy_spread, found.padding_waste) == (1.0, 0.0)
