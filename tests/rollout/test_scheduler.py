"""Continuous batching: who runs where."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.rollout.native.scheduler import Row, Scheduler


def rows(*prompts: int) -> list[Row]:
    return [Row(index, (prompt,), seed=0) for index, prompt in enumerate(prompts)]


def test_a_shared_prompt_is_computed_once_and_later_copied_from_a_running_row():
    scheduler = Scheduler(rows(7, 7, 8, 7, 9), num_slots=3)
    first = scheduler.admit()
    assert first.prompts == [(7,), (8,)]
    assert first.computed == [(0, 0), (0, 1), (1, 2)]
    assert [row.index for row in scheduler.finish([0])] == [0]
    second = scheduler.admit()
    assert second.prompts == []
    assert second.copied == [(1, 0)]
    scheduler.finish([0, 1])
    third = scheduler.admit()
    assert third.prompts == [(9,)]
    assert third.computed == [(0, 0)]
    assert scheduler.close_gaps() == [(2, 1)]
    assert [row.index for row in scheduler.running()] == [4, 2]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
def test_slots_stay_dense_and_bounded_and_every_row_runs_once_with_its_prompt(data, prompts, num_slots):
    waiting = rows(*prompts)
    scheduler, finished = Scheduler(waiting, num_slots=num_slots), []
    holds: dict[int, tuple[int, ...]] = {}  # what the cache has in each slot
    while not scheduler.is_done:
        admitted = scheduler.admit()
        for source, target in admitted.copied:
            holds[target] = holds[source]
        for index, slot in admitted.computed:
            holds[slot] = admitted.prompts[index]
        for source, target in scheduler.close_gaps():
            holds[target] = holds[source]
        running = scheduler.running()
        assert len(running) == scheduler.num_running <= num_slots
        assert [row.prompt for row in running] == [holds[slot] for slot in range(len(running))]
        assert len(running) == min(num_slots, len(waiting) - len(finished))
        count = data.draw(st.integers(1, len(running)))
        slots = data.draw(st.permutations(range(len(running))))[:count]
        finished += [row.index for row in scheduler.finish(slots)]
    assert sorted(finished) == list(range(len(waiting)))
