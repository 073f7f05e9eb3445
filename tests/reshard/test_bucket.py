"""Messages: same at both ends, within the limit, in one order; buckets within theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.reshard import bucket
from rlhf.reshard.bucket import buckets_of, digests, messages_of, split
from rlhf.reshard.layout import Box
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from tests.reshard.toy import Toy, engine, source

TOY = Toy(vocab=23, hidden=6, heads=8, kv_heads=4, head_dim=2, ffn=20, layers=4)
PLAN = make_plan(
    source(TOY, tp=2, stages=(1, 3), dp=2), engine(TOY, tp=4, dp=2, first_rank=2), Topology.blocks(10, ranks_per_node=4)
)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=3), st.integers(1, 60))
def test_split_cuts_within_the_limit_and_loses_nothing(spans, limit):
    box = Box(tuple((start, start + length) for start, length in spans))
    parts = list(split(box, limit))
    assert max(part.num_elements for part in parts) <= limit
    assert sum(part.num_elements for part in parts) == box.num_elements
    assert all(box.contains(part) for part in parts)
    assert all(a.intersect(b) is None for at, a in enumerate(parts) for b in parts[:at])


@pytest.mark.parametrize("bucket_bytes", [8, 100, 1000, 1 << 20])
def test_both_ends_of_a_pair_make_the_same_messages_in_the_same_order(bucket_bytes):
    both = {rank: messages_of(PLAN, PLAN.of(rank), bucket_bytes) for rank in PLAN.ranks}
    pairs = [(a, b) for a in PLAN.ranks for b in PLAN.ranks if a != b]
    for a, b in pairs:
        sent = [message for message in both[a][1] if message.dst_rank == b]
        received = [message for message in both[b][0] if message.src_rank == a]
        assert sent == received
        assert digests(sent) == digests(received)
    keys = [message.key for rank in PLAN.ranks for message in both[rank][1]]
    assert len(set(keys)) == len(keys)  # a total order
    half = max(1, bucket_bytes // 8)
    assert all(message.num_elements <= half for rank in PLAN.ranks for message in both[rank][1])


def test_buckets_keep_the_order_and_the_limit():
    receives, sends = messages_of(PLAN, PLAN.of(4), 400)
    buckets = buckets_of(receives, sends, 100)
    assert len(buckets) > 3
    assert max(bucket.num_elements for bucket in buckets) <= 100
    assert [m for bucket in buckets for m in bucket.receives] == list(receives)
    assert [m for bucket in buckets for m in bucket.sends] == list(sends)
    last = [max(m.key for m in (*bucket.receives, *bucket.sends)) for bucket in buckets]
    first = [min(m.key for m in (*bucket.receives, *bucket.sends)) for bucket in buckets]
    assert all(before < after for before, after in zip(last, first[1:], strict=False))


def test_a_large_block_is_a_message_of_its_own(monkeypatch):
    monkeypatch.setattr(bucket, "ALONE_BYTES", 4 * 30)
    for rank in PLAN.ranks:
        for message in messages_of(PLAN, PLAN.of(rank), 1 << 20)[0]:
            sizes = [move.box.num_elements for move in message.moves]
            assert max(sizes) < 30 or len(sizes) == 1
    joined = [len(m.moves) for rank in PLAN.ranks for m in messages_of(PLAN, PLAN.of(rank), 1 << 20)[0]]
    assert {n > 1 for n in joined} == {True, False}


def test_a_changed_block_changes_the_digest():
    receives, _ = messages_of(PLAN, PLAN.of(4), 400)
    assert digests(receives) != digests(receives[:-1])
