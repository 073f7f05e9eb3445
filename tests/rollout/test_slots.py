"""How the native engine's cache is cut while rows come and go."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.rollout.native.memory import SPAN_STEP
from rlhf.rollout.native.scheduler import Row, Scheduler
from rlhf.rollout.native.slots import Cut, SlotPlan

CACHE, NEW = 20 * SPAN_STEP, 5


def plan_of(max_running: int) -> tuple[Scheduler, SlotPlan]:
    scheduler = Scheduler(num_slots=0)
    return scheduler, SlotPlan(scheduler, max_running=max_running, cache_tokens=CACHE, max_new_tokens=NEW)


def row(index: int, prompt_tokens: int) -> Row:
    return Row(index, (1,) * prompt_tokens, seed=0)


def test_slots_grow_for_a_longer_row_once_few_enough_run():
    scheduler, plan = plan_of(8)
    plan.add([row(i, 12) for i in range(8)])
    assert plan.next_cut() == Cut(8, SPAN_STEP)  # 12 + 5 - 1 tokens of keys and values
    scheduler.admit()
    assert plan.next_cut() is None
    plan.add([row(8, 4 * SPAN_STEP)])  # 5 spans: room for 4 rows
    scheduler.finish([0, 1, 2])
    assert plan.next_cut() is None
    assert scheduler.admit().rows == []  # five run
    scheduler.finish([3])
    assert plan.next_cut() == Cut(4, 5 * SPAN_STEP)
    assert scheduler.admit().rows == []
    scheduler.finish([4])
    assert plan.next_cut() is None
    assert [one.index for one in scheduler.admit().rows] == [8]


def test_slots_shrink_when_that_lets_more_rows_run_and_are_worth_it():
    scheduler, plan = plan_of(8)
    plan.add([row(0, 100)])
    assert plan.next_cut() == Cut(2, 7 * SPAN_STEP)
    scheduler.admit()
    plan.add([row(1, 100), row(2, 3), row(3, 3)])
    assert plan.next_cut() is None
    scheduler.admit()
    scheduler.finish([0, 1])
    assert plan.next_cut() is None  # the two that wait have slots enough
    assert scheduler.num_open == 2
    plan.add([row(4, 3)])
    assert plan.next_cut() == Cut(8, SPAN_STEP)


def test_slots_shrink_for_rows_that_come_one_by_one_too():
    """Of 200 rows one in 40 is long; a row runs for about 6 steps. In slots as long as the first row it takes 203."""
    scheduler, plan = plan_of(8)
    waiting = [row(i, 4 * SPAN_STEP if i % 40 == 0 else 3) for i in range(200)]
    steps = 0
    while waiting or not scheduler.is_done:
        room = plan.room if scheduler.num_running else 8
        while waiting and scheduler.num_waiting < room:
            plan.add([waiting.pop(0)])
        plan.next_cut()
        scheduler.admit()
        scheduler.close_gaps()
        steps += 1
        ended = [slot for slot, one in scheduler.occupied() if (one.index + steps) % 6 == 0]
        scheduler.finish(ended)
    assert steps < 115


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(1, CACHE - NEW), min_size=1, max_size=12), st.integers(1, 6))
def test_every_row_gets_a_slot_as_long_as_it_may_grow_and_the_memory_is_never_exceeded(data, lengths, max_running):
    scheduler, plan = plan_of(max_running)
    waiting = [row(i, length) for i, length in enumerate(lengths)]
    cut, finished = Cut(0, 0), 0
    while finished < len(lengths):
        count = data.draw(st.integers(int(scheduler.is_done), len(waiting)) if waiting else st.just(0))
        plan.add(waiting[:count])
        waiting = waiting[count:]
        if (new := plan.next_cut()) is not None:
            cut = new
        scheduler.admit()
        running = scheduler.running()
        assert 1 <= len(running) <= cut.num_slots <= max_running
        assert cut.num_slots * cut.slot_tokens <= CACHE
        assert all(len(one.prompt) + NEW - 1 <= cut.slot_tokens for one in running)
        scheduler.close_gaps()
        finished += len(scheduler.finish(range(data.draw(st.integers(1, len(running))))))
