"""A plan names every group once, evens out what is expected, and keeps prompts with a long common prefix together."""

from hypothesis import given
from hypothesis import strategies as st

from rlhf.rollout.routes import PREFIX_TOKENS, Group, Queue, bucket_routes, dynamic_routes

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 500)), max_size=40)


def groups_of(sizes: list[tuple[int, int]]) -> list[Group]:
    """Rows and expected tokens of each; prompts that share nothing."""
    return [Group((at, *range(rows)), rows, tokens) for at, (rows, tokens) in enumerate(sizes)]


def family(first: int, count: int, *, tokens: int = 100) -> list[Group]:
    """Prompts with a long prefix of their own."""
    return [Group((first,) * PREFIX_TOKENS + (at,), 1, tokens) for at in range(count)]


def members(queue: Queue) -> list[int]:
    return [at for unit in queue for at in unit.groups]


@given(SIZES, st.integers(1, 5))
def test_every_group_is_in_one_queue_and_no_queue_exceeds_its_share_by_more_than_a_group(sizes, num_engines):
    groups = groups_of(sizes)
    queues = dynamic_routes(groups, num_engines)
    assert sorted(at for queue in queues for at in members(queue)) == list(range(len(groups)))
    tokens = [group.tokens for group in groups]
    for queue in queues:
        assert sum(unit.tokens for unit in queue) <= sum(tokens) / num_engines + max(tokens, default=0)
        assert all(unit.tokens == groups[at].tokens for unit in queue for at in unit.groups)


def test_the_longest_expected_come_first_in_every_queue():
    groups = [Group((at,), 1, tokens) for at, tokens in enumerate([5, 90, 20, 70, 60, 10, 80, 30])]
    for queue in dynamic_routes(groups, 2):
        tokens = [unit.tokens for unit in queue]
        assert tokens == sorted(tokens, reverse=True)
        assert len(tokens) == 4


def test_prompts_that_share_a_long_prefix_go_to_one_engine_next_to_one_another():
    groups = [group for mixed in zip(family(1, 4), family(2, 4), family(3, 4), strict=True) for group in mixed]
    queues = [members(queue) for queue in dynamic_routes(groups, 3)]
    assert sorted({at % 3 for at in queue} for queue in queues) == [{0}, {1}, {2}]
    first, second = (members(queue) for queue in dynamic_routes(family(1, 3) + family(2, 3) + family(3, 4), 2))
    for queue in (first, second):
        families = ["aaabbbcccc"[at] for at in queue]
        assert families == sorted(families, key=families.index)


def test_a_family_that_is_more_than_a_share_is_cut():
    queues = dynamic_routes(family(1, 9) + family(2, 1), 2)
    assert [len(queue) for queue in queues] == [5, 5]


def test_a_prefix_that_all_prompts_share_binds_none_to_another():
    system = (7,) * 200
    groups = [Group((*system, at), 1, 100) for at in range(6)]
    assert [len(queue) for queue in dynamic_routes(groups, 3)] == [2, 2, 2]
    with_families = [Group(system + group.prompt, 1, 100) for group in family(1, 2) + family(2, 2) + family(3, 2)]
    assert sorted(sorted(members(queue)) for queue in dynamic_routes(with_families, 3)) == [[0, 1], [2, 3], [4, 5]]


@given(SIZES, st.integers(1, 4), st.integers(1, 12))
def test_a_batch_holds_whole_groups_of_one_bucket_and_no_more_rows_than_fit(sizes, num_engines, max_rows):
    groups = [Group((at,) * (at % 30 + 1), rows, tokens) for at, (rows, tokens) in enumerate(sizes)]
    queues = bucket_routes(groups, num_engines, edges=(8, 20), max_rows=max_rows, max_tokens=700)
    assert sorted(at for queue in queues for at in members(queue)) == list(range(len(groups)))
    for unit in (unit for queue in queues for unit in queue):
        lengths = [len(groups[at].prompt) for at in unit.groups]
        assert len({(length > 8) + (length > 20) for length in lengths}) == 1
        assert len(unit.groups) == 1 or sum(groups[at].rows for at in unit.groups) <= max_rows
        assert len(unit.groups) == 1 or sum(groups[at].tokens for at in unit.groups) <= 700


def test_a_bucket_is_cut_into_as_many_batches_for_each_engine():
    groups = [Group((at,), 2, 10) for at in range(20)]
    queues = bucket_routes(groups, 4, edges=(8,), max_rows=16, max_tokens=10**6)
    assert [[2 * len(unit.groups) for unit in queue] for queue in queues] == [[10], [10], [10], [10]]
