from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.permutation import permuted, stable_hash


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_every_index_is_hit_exactly_once(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_keys_give_different_orders_and_one_key_the_same():
    orders = {tuple(permuted(i, 50, key) for i in range(50)) for key in range(20)}
    assert len(orders) == 20
    assert [permuted(i, 50, 3) for i in range(50)] == [permuted(i, 50, 3) for i in range(50)]


def test_positions_are_spread_evenly():
    # Where element 0 of 10 lands over 2000 keys: each place 200 times, give or take 5 standard deviations (13.4).
    counts = [0] * 10
    for key in range(2000):
        counts[permuted(0, 10, key)] += 1
    assert all(abs(count - 200) < 67 for count in counts), counts


def test_hash_is_the_same_on_every_machine():
    assert stable_hash("order", 1, 2) == 15375554171472371088
    assert stable_hash("order", 1, 2) != stable_hash("order", 12)
