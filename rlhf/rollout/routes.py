"""Which engine is to answer which prompt: a queue for each engine. Pure; every leader makes the same plan by itself.

What a response will take is not known. The plan is a good start, and what it got wrong is moved while engines run
(claims.py).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PREFIX_TOKENS = 64
"""Prompts that share so many tokens, beyond those that all prompts share, are better answered by one engine."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one prompt; one engine answers them, so that it computes the prompt once."""

    prompt: tuple[int, ...]
    """Its tokens."""
    rows: int
    """Responses wanted."""
    tokens: int
    """What it is expected to take: tokens to be computed and sampled."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What an engine takes at once."""

    groups: tuple[int, ...]
    """Indices into the groups that the plan was made of."""
    tokens: int
    """What they are expected to take together."""


Queue = tuple[Unit, ...]


def dynamic_routes(groups: Sequence[Group], num_engines: int) -> tuple[Queue, ...]:
    """A queue for each engine, with one group a unit.

    Every group is in one queue. Groups whose prompts share a long prefix are in one queue, next to one another, as far
    as no queue gets more than its share; each queue begins with what is expected to take longest.
    """
    queues = _dealt(_families(groups), groups, num_engines)
    return tuple(tuple(Unit((at,), groups[at].tokens) for piece in queue for at in piece) for queue in queues)


def bucket_routes(
    groups: Sequence[Group], num_engines: int, *, edges: Sequence[int], max_rows: int, max_tokens: int
) -> tuple[Queue, ...]:
    """A queue for each engine, whose units are batches: groups of one length bucket, max_rows rows at most.

    A bucket holds the prompts of more tokens than the edge before and no more than its own; the last one, all longer
    ones. A batch is expected to take no more than max_tokens, the room of an engine, so that none of its rows must wait
    for another's end. A group of more than that is a batch by itself. Batches with the longest prompts come first.
    """
    limits = max_rows, max_tokens
    buckets: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for at in sorted(range(len(groups)), key=lambda at: (-len(groups[at].prompt), groups[at].prompt, at)):
        buckets[bisect_left(edges, len(groups[at].prompt))].append(at)
    batches = [batch for bucket in reversed(buckets) for batch in _batches(bucket, groups, num_engines, limits)]
    dealt = _dealt([[at] for at in range(len(batches))], [_of_batch(batch, groups) for batch in batches], num_engines)
    units = [Unit(tuple(batch), sum(groups[at].tokens for at in batch)) for batch in batches]
    return tuple(tuple(units[at] for piece in queue for at in piece) for queue in dealt)


def joined(queue: Queue) -> Unit:
    """All units of a queue as one."""
    return Unit(tuple(at for unit in queue for at in unit.groups), sum(unit.tokens for unit in queue))


def _batches(
    bucket: Sequence[int], groups: Sequence[Group], num_engines: int, limits: tuple[int, int]
) -> list[list[int]]:
    """Consecutive groups of a bucket as batches of about as many rows each, as many batches for each engine.

    `limits`: rows and tokens of a batch.
    """
    sizes = {at: (groups[at].rows, groups[at].tokens) for at in bucket}
    whole = [sum(size[i] for size in sizes.values()) for i in range(2)]
    num_batches = max(-(-whole[i] // (num_engines * limits[i])) for i in range(2)) * num_engines
    batches: list[list[int]] = []
    filled = [0, 0]
    for at in bucket:
        full = any(filled[i] + sizes[at][i] > limits[i] for i in range(2))
        if not batches or full or filled[0] * num_batches >= whole[0]:
            batches.append([])
            filled = [0, 0]
        batches[-1].append(at)
        filled = [filled[i] + sizes[at][i] for i in range(2)]
    return batches


def _of_batch(batch: Sequence[int], groups: Sequence[Group]) -> Group:
    """A batch as one group, for dealing: it takes as long as its longest prompt and response, whatever its rows."""
    return Group((), len(batch), max(-(-groups[at].tokens // groups[at].rows) for at in batch))


def _families(groups: Sequence[Group]) -> list[list[int]]:
    """Groups whose prompts share a long prefix; those of each, longest expected first."""
    order = sorted(range(len(groups)), key=lambda at: (groups[at].prompt, at))
    if not order:
        return []
    all_share = _shared(groups[order[0]].prompt, groups[order[-1]].prompt)
    families = [[order[0]]]
    for before, at in pairwise(order):
        if _shared(groups[before].prompt, groups[at].prompt) >= all_share + PREFIX_TOKENS:
            families[-1].append(at)
        else:
            families.append([at])
    return [sorted(family, key=lambda at: (-groups[at].tokens, at)) for family in families]


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    ends = (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(ends, min(len(a), len(b)))


def _dealt(families: list[list[int]], groups: Sequence[Group], num_engines: int) -> list[list[list[int]]]:
    """For each engine the pieces of families that it gets, those with the longest group first.

    The largest family is dealt first, to the engine with least to do. A family that would give it more than its share
    goes on at the next.
    """
    share = sum(group.tokens for group in groups) / num_engines
    loads, queues = [0] * num_engines, [list[list[int]]() for _ in range(num_engines)]
    for family in sorted(families, key=lambda family: (-sum(groups[at].tokens for at in family), family)):
        engine = loads.index(min(loads))
        queues[engine].append([])
        for at in family:
            if queues[engine][-1] and loads[engine] + groups[at].tokens > share:
                engine = loads.index(min(loads))
                queues[engine].append([])
            queues[engine][-1].append(at)
            loads[engine] += groups[at].tokens
    return [sorted((piece for piece in q if piece), key=lambda piece: -groups[piece[0]].tokens) for q in queues]
