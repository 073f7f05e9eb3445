"""How far the clocks of other hosts are ahead of rank 0's, with a bound on the error.

The monotonic clock counts from each machine's own start. Ranks of one host share it; between hosts it is read by
question and answer: the first rank notes its clock, asks, the other answers with its own clock, the first notes again.
The answer was read somewhere between the two notes, so half their distance bounds the error; the quickest of some
rounds is taken. Clocks also drift apart by some 10 microseconds a second, which is not corrected.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.dist.agree import from_first, gather

ROUNDS = 10
TAG = 0  # role calls use tags from 2 on


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One rank's clock beside that of the group's first rank."""

    ahead_s: float
    """Its clock minus that of the first rank at the same moment."""
    error_s: float
    """By how much this may be wrong, either way."""


def compare_clocks(
    host: str, group: ProcessGroup, *, clock: Callable[[], float] = time.monotonic
) -> list[ClockReading]:
    """A reading for each rank of a gloo group, in the group's order, the same on all of them.

    Collective over `group`; nothing else may be under way on it. One rank of each host speaks to the first rank, one
    host after the other.
    """
    hosts = gather(host, group)
    me, leaders = dist.get_rank(group), {name: hosts.index(name) for name in dict.fromkeys(hosts)}
    readings = {hosts[0]: ClockReading(0.0, 0.0)}
    for name, leader in leaders.items():
        if name == hosts[0]:
            continue
        if me == 0:
            readings[name] = min((_ask(leader, group, clock) for _ in range(ROUNDS)), key=lambda r: r.error_s)
        elif me == leader:
            for _ in range(ROUNDS):
                _answer(group, clock)
    readings = from_first(readings, group)
    return [readings[name] for name in hosts]


def _ask(leader: int, group: ProcessGroup, clock: Callable[[], float]) -> ClockReading:
    cell = torch.zeros(1, dtype=torch.float64)
    before = clock()
    dist.send(cell, group=group, group_dst=leader, tag=TAG)
    dist.recv(cell, group=group, group_src=leader, tag=TAG)
    after = clock()
    return ClockReading(float(cell) - (before + after) / 2, (after - before) / 2)


def _answer(group: ProcessGroup, clock: Callable[[], float]) -> None:
    cell = torch.zeros(1, dtype=torch.float64)
    dist.recv(cell, group=group, group_src=0, tag=TAG)
    cell[0] = clock()
    dist.send(cell, group=group, group_dst=0, tag=TAG)
