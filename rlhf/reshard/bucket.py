"""Moves packed into messages, messages into buckets: staging memory has a bound, and no rank waits for ever.

All messages of the job have one total order, of which every rank knows its own part. A rank has the messages of two
buckets under way at a time, in that order. So the first unfinished message of the job is always under way at both of
its ends, and the transfer goes on whatever the sizes of the pools. What a rank passes on comes later in the order than
what it received for it, and in a later bucket, which starts when that one is done; so the same holds.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rlhf.errors import WeightSyncError
from rlhf.reshard.layout import Box
from rlhf.reshard.plan import Move, Plan, RankPlan

OrderKey = tuple[int, int, int, bool, int]

ALONE_BYTES = 2**18
"""A block of at least this size is a message of its own, so that an end where it is contiguous need not copy it."""


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks that travel together from one rank to another, packed one after the other."""

    src_rank: int
    dst_rank: int
    moves: tuple[Move, ...]
    num_elements: int
    key: OrderKey
    """Place in the order of the job: round over the sources' shards, turn of the peers, source, whether it is passed
    on, number of its pair."""

    @property
    def passed_on(self) -> bool:
        """Whether it is read from the sender's destination parameters."""
        return self.moves[0].passed_on


@dataclass(frozen=True, slots=True)
class Bucket:
    """Messages of one rank that are under way together."""

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    after: int = -1
    """Number of the bucket that must be done before this one starts, for it brings what this one passes on."""

    @property
    def num_elements(self) -> int:
        """Elements staged for this bucket at most."""
        return sum(message.num_elements for message in (*self.receives, *self.sends))


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a block into blocks of at most max_elements, along its first dims, in order of index."""
    if box.num_elements <= max_elements:
        yield box
        return
    # The first dim with more than one index is cut; when one index of it is still too large, the next dim is.
    dim = next(at for at, extent in enumerate(box.shape) if extent > 1)
    start, stop = box.spans[dim]
    step = max(1, max_elements // prod(box.shape[dim + 1 :]))
    for low in range(start, stop, step):
        part = Box((*box.spans[:dim], (low, min(low + step, stop)), *box.spans[dim + 1 :]))
        yield from split(part, max_elements)


def messages_of(plan: Plan, part: RankPlan, bucket_bytes: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """One rank's (receives, sends) as messages of at most half a bucket, each in the order of the job."""
    item_bytes = plan.src.item_bytes
    packer = _Packer(plan, max(1, bucket_bytes // 2 // item_bytes), ALONE_BYTES // item_bytes)
    return packer.messages(part.receives), packer.messages(part.sends)


def buckets_of(
    receives: Sequence[Message], sends: Sequence[Message], max_elements: int, *, windowed: bool = False
) -> tuple[Bucket, ...]:
    """Cut one rank's messages, in the order of the job, into buckets of at most max_elements each.

    A message larger than that (none is, when `messages_of` made it with the same limit) has a bucket of its own.
    `windowed`: rounds are numbers of windows; a bucket is of one window, and what it receives, which lies in a region,
    does not count.
    """
    into = {id(message) for message in receives}
    arrives: dict[tuple[str, Box], int] = {}
    buckets: list[Bucket] = []
    now: list[Message] = []
    filled = 0
    for message in sorted((*receives, *sends), key=lambda m: m.key):
        incoming = id(message) in into
        waits = message.passed_on and not incoming and _needs(message, arrives) == len(buckets)
        more = 0 if windowed and incoming else message.num_elements
        turns = windowed and now and message.key[0] != now[0].key[0]
        if now and (waits or turns or filled + more > max_elements):
            buckets.append(_bucket(now, into, arrives))
            now, filled = [], 0
        now.append(message)
        filled += more
        if incoming:
            arrives |= {(move.tensor, move.box): len(buckets) for move in message.moves}
    return (*buckets, _bucket(now, into, arrives)) if now else tuple(buckets)


def _needs(message: Message, arrives: Mapping[tuple[str, Box], int]) -> int:
    """Number of the last bucket that brings what a message passes on."""
    return max(arrives[move.tensor, move.box] for move in message.moves)


def _bucket(messages: Sequence[Message], into: set[int], arrives: Mapping[tuple[str, Box], int]) -> Bucket:
    sends = tuple(message for message in messages if id(message) not in into)
    return Bucket(
        receives=tuple(message for message in messages if id(message) in into),
        sends=sends,
        after=max((_needs(message, arrives) for message in sends if message.passed_on), default=-1),
    )


def digests(messages: Iterable[Message]) -> dict[tuple[int, int], int]:
    """A 63-bit hash of the messages of each (source, destination) pair: both ends must find the same."""
    pairs: dict[tuple[int, int], hashlib.blake2b] = {}
    for message in messages:
        pair = (message.src_rank, message.dst_rank)
        hashed = pairs.setdefault(pair, hashlib.blake2b(digest_size=8))
        hashed.update(repr((message.key, [(move.tensor, move.box.spans) for move in message.moves])).encode())
    return {pair: int.from_bytes(hashed.digest(), "little") >> 1 for pair, hashed in pairs.items()}


def ends_of(receives: Iterable[Message], sends: Iterable[Message], rank: int, ranks: Sequence[int]) -> list[int]:
    """A rank's hashes of what it sends to each of the ranks, then of what it receives from each; 0 for nothing."""
    outgoing, incoming = digests(sends), digests(receives)
    return [*(outgoing.get((rank, to), 0) for to in ranks), *(incoming.get((of, rank), 0) for of in ranks)]


def check_ends(ends: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raise WeightSyncError unless both ends of every pair have the same messages in mind; `ends` of each rank."""
    for a, sender in enumerate(ranks):
        for b, receiver in enumerate(ranks):
            if ends[a][b] != ends[b][len(ranks) + a]:
                raise WeightSyncError(
                    f"reshard: ranks {sender} and {receiver} planned different messages; needs the same layouts, "
                    "topology, fanout and bucket size on every rank; compare their configs and code"
                )


class _Packer:
    """Joins the moves of each pair of ranks into messages; both ends of a pair come to the same."""

    def __init__(self, plan: Plan, max_elements: int, alone_elements: int) -> None:
        self._plan, self._max, self._alone = plan, max_elements, alone_elements
        self._place = {rank: at for at, rank in enumerate(plan.ranks)}
        self._shards: dict[int, dict[str, _Held]] = {}

    def messages(self, moves: Iterable[Move]) -> tuple[Message, ...]:
        pairs: dict[tuple[int, int, bool], list[Move]] = {}
        for move in moves:
            pairs.setdefault((move.src_rank, move.dst_rank, move.passed_on), []).append(move)
        found = [message for pair, of in pairs.items() for message in self._pack(*pair, of)]
        return tuple(sorted(found, key=lambda message: message.key))

    def _pack(self, src: int, dst: int, passed_on: bool, moves: Iterable[Move]) -> Iterator[Message]:
        """A pair's moves, cut to size; small ones are joined while they lie in one round of the source's shard."""
        # Ranks take turns as each other's peers, so that nobody is sent to by everybody at once.
        turn = (self._place[dst] - self._place[src]) % len(self._place)
        now: list[Move] = []
        filled, limit, now_round, number = 0, 0, -1, 0
        for move in moves:
            for box in split(move.box, self._max):
                # What is passed on is a round behind what brought it, and so after it in the order.
                at = self._round(move.origin, move.tensor, box) + 1 if passed_on else self._round(src, move.tensor, box)
                alone = box.num_elements >= self._alone
                if now and (alone or at != now_round or filled + box.num_elements > limit):
                    yield Message(src, dst, tuple(now), filled, (now_round, turn, src, passed_on, number))
                    now, filled, number = [], 0, number + 1
                limit = 0 if alone else self._max
                now.append(Move(move.tensor, box, src, dst, move.origin))
                filled, now_round = filled + box.num_elements, at
        if now:
            yield Message(src, dst, tuple(now), filled, (now_round, turn, src, passed_on, number))

    def _round(self, src: int, tensor: str, box: Box) -> int:
        """How far into the source's shard a block lies, in steps of a few messages.

        By the source's shard and not by the model, so that all pipeline stages send from the start.
        """
        if src not in self._shards:
            self._shards[src] = _shard(self._plan, src)
        held = self._shards[src][tensor]
        into = held.num_elements * (box.spans[0][0] - held.low) // (held.high - held.low)
        return (held.start + into) // (4 * self._max)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor's place in a source rank's shard: elements before it, of it, and its range along dim 0."""

    start: int
    num_elements: int
    low: int
    high: int


def _shard(plan: Plan, src: int) -> dict[str, _Held]:
    found, start = {}, 0
    of_rank = plan.src_index.of_rank(src)
    for tensor in sorted(of_rank, key=lambda name: plan.order[name]):
        boxes = [one.box for one in of_rank[tensor]]
        held = _Held(
            start,
            sum(box.num_elements for box in boxes),
            min(box.spans[0][0] for box in boxes),
            max(box.spans[0][1] for box in boxes),
        )
        found[tensor] = held
        start += held.num_elements
    return found
