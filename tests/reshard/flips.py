"""What the ranks of the verification tests do: bits are flipped, and what a sync says of them is read."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from random import Random

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.groups import GroupFactory
from rlhf.errors import WeightSyncError
from rlhf.reshard import turn
from rlhf.reshard.execute import execute
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.quarantine import MOST_IN_A_ROW, OnMismatch
from rlhf.reshard.topology import Topology
from rlhf.reshard.turn import SLICES
from rlhf.reshard.verify import Verify
from rlhf.reshard.weight_sync import WeightSync
from tests.reshard.toy import brute_force_bound, empty_params, filled_params, full_tensors

Params = dict[str, torch.Tensor]
NAMED = re.compile(r"rank (\d+) holds ([\w.]+)\[([\d:, ]+)\] otherwise \(given ([0-9a-f]{16}), held ([0-9a-f]{16})\)")
BITS = {2: torch.int16, 4: torch.int32}


class Job:
    """Source, destination and this rank's parameters on both sides."""

    def __init__(self, src: ModelLayout, dst: ModelLayout, group: dist.ProcessGroup, **kept: object) -> None:
        self.src, self.dst, self.rank = src, dst, dist.get_rank()
        self.sync = WeightSync(src, dst, topology=Topology.blocks(4, ranks_per_node=2), group=group, **kept)
        dtype = getattr(torch, src.dtype)
        full = {name: tensor.sin() for name, tensor in full_tensors(src.tensors).items()}
        self.given = {name: p.to(dtype) for name, p in filled_params(src, self.rank, full).items()}
        self.landed = {name: p.to(dtype) for name, p in empty_params(dst, self.rank, fill=-7.0).items()}

    def update(self, **kept: object) -> object:
        return self.sync.update_weights(self.given, self.landed, **kept)


def flip(params: Params, one: ParamLayout, at: tuple[int, ...], bit: int) -> None:
    """Flip a bit of the element at a global index."""
    param, size = params[one.param], params[one.param].dtype.itemsize
    place = tuple(start for start, _ in one.param_box(Box(tuple((i, i + 1) for i in at))).spans)
    param.view(BITS[size])[place] ^= 1 << bit if bit < 8 * size - 1 else -(1 << bit)


def pick(layout: ModelLayout, draw: Random) -> tuple[int, ParamLayout, tuple[int, ...]]:
    """A rank, something that it holds, and a global index in that."""
    rank = draw.choice(layout.ranks)
    one = draw.choice(layout.holdings(rank))
    return rank, one, tuple(draw.randrange(start, stop) for start, stop in one.box.spans)


def named(error: BaseException) -> list[tuple[int, str, Box]]:
    """(rank, tensor, box) of every mismatch in a message."""
    found = []
    for rank, tensor, spans, given, held in NAMED.findall(str(error)):
        assert given != held
        pairs = (span.split(":") for span in spans.split(", "))
        found.append((int(rank), tensor, Box(tuple((int(start), int(stop)) for start, stop in pairs))))
    return found


def hundred_flips(group: dist.ProcessGroup, src: ModelLayout, dst: ModelLayout, *, seed: int, count: int) -> None:
    """Each of so many bits flipped on a destination rank, where nothing is sent any more, is named within 20 syncs."""
    job, draw = Job(src, dst, group), Random(seed)
    within = []
    for _ in range(count):
        job.update(changed=())  # complete after a failure, so everything is right again
        for _ in range(draw.randrange(3)):
            job.update(changed=())
        victim, one, at = pick(dst, draw)
        bit = draw.randrange(8 * dst.item_bytes)
        if job.rank == victim:
            flip(job.landed, one, at, bit)
        within.append(0)
        for _ in range(SLICES):
            within[-1] += 1
            try:
                assert job.update(changed=()).moved == 0
            except WeightSyncError as error:
                found = named(error)
                break
        else:
            pytest.fail(f"bit {bit} of {one.tensor}{at} on rank {victim} was not seen within {SLICES} syncs")
        assert found == [(victim, one.tensor, Box(tuple((i, i + 1) for i in at)))]

    assert max(within) > SLICES // 2, "a sample that always finds it at once is no sample"


def flips_on_the_way(group: dist.ProcessGroup, src: ModelLayout, dst: ModelLayout) -> None:
    """A source whose memory changes after it was sent, and one that changed against the caller's word."""
    job, draw = Job(src, dst, group, verify=Verify.ALL), Random(5)
    for _ in range(4):
        rank, one, at = pick(src, draw)

        def hurt(rank=rank, one=one, at=at) -> None:
            if job.rank == rank:
                flip(job.given, one, at, 12)

        with damage(hurt), pytest.raises(WeightSyncError) as caught:
            job.update()
        found = named(caught.value)
        point = Box(tuple((i, i + 1) for i in at))
        assert found or one.tensor in str(caught.value)
        assert all((tensor, box) == (one.tensor, point) for _, tensor, box in found)
        takers = {r for r in dst.ranks for held in dst.holdings(r) if held.tensor == one.tensor}
        assert {taker for taker, _, _ in found} <= takers
        hurt()  # the second flip takes the first back


@contextmanager
def damage(hurt: Callable[[], None]) -> Iterator[None]:
    """Call `hurt` after the bytes were moved, before they are compared."""

    def execute_badly(*args: object, **kept: object) -> None:
        execute(*args, **kept)
        hurt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.reshard.way.execute", execute_badly)
        yield


def quarantine(group: dist.ProcessGroup, src: ModelLayout, dst: ModelLayout) -> None:
    """A fault that goes away is mended; one that stays leaves its engine out; the third in a row ends the run."""
    engines = [dst.ranks[:2], dst.ranks[2:]]
    job = Job(src, dst, group, verify=Verify.ALL, on_mismatch=OnMismatch.QUARANTINE, engines=engines)
    right = filled_params(dst, job.rank, {name: t.sin() for name, t in full_tensors(src.tensors).items()})
    victim, complete = dst.ranks[-1], 4 * sum(brute_force_bound(src, dst).values())
    one = dst.holdings(victim)[3]
    times = [0]

    def hurt() -> None:
        times[0] -= 1
        if job.rank == victim and times[0] >= 0:
            flip(job.landed, one, tuple(start for start, _ in one.box.spans), 30)

    def holds_all() -> bool:
        places = [one.param_box(one.box).slices for one in dst.holdings(job.rank)]
        params = [one.param for one in dst.holdings(job.rank)]
        return all(torch.equal(job.landed[p][at], right[p][at]) for p, at in zip(params, places, strict=True))

    with damage(hurt):
        times[0] = 1
        stats = job.update()
        assert f"rank {victim} holds {one.tensor}[" in stats.differed
        assert (stats.left_out, stats.moved, stats.bound) == ((), 2 * complete, complete)
        assert holds_all()
        assert job.update(changed=()).moved == 0

        def bad_syncs(count: int) -> None:
            for _ in range(count):
                times[0] = 2
                stats = job.update()
                assert stats.left_out == (engines[1],)
                assert [stats.leaves_out(rank) for rank in dst.ranks] == [False, False, True, True]

        bad_syncs(MOST_IN_A_ROW - 1)
        assert not holds_all() or job.rank != victim
        stats = job.update(changed=())
        assert (stats.left_out, stats.differed, stats.moved) == ((), "", complete)  # complete, whatever changed
        assert holds_all()
        bad_syncs(MOST_IN_A_ROW - 1)  # counted anew
        times[0] = 2
        with pytest.raises(WeightSyncError, match=rf"3 transfers in a row, .*rank {victim} holds {one.tensor}\["):
            job.update()


def many_wrong(group: dist.ProcessGroup, src: ModelLayout, dst: ModelLayout) -> None:
    """Everything wrong on one rank, and two elements of one tensor: blocks around them; the message stays short."""
    job = Job(src, dst, group)
    victim = dst.ranks[0]

    def ruin() -> None:
        if job.rank == victim:
            for param in job.landed.values():
                param.zero_()

    with damage(ruin), pytest.raises(WeightSyncError, match=r"; and \d+ more; needs equal checksums") as caught:
        job.update()
    held = {one.tensor: one.box for one in dst.holdings(victim)}
    for rank, tensor, box in named(caught.value):
        assert rank == victim
        assert held[tensor].contains(box)
        assert box.num_elements > held[tensor].num_elements / 2
    assert len(str(caught.value)) < 1000

    one = next(one for one in dst.holdings(victim) if one.tensor == "1.down")
    (low, high), (left, right) = one.box.spans
    corners = [(low + 3, left + 1), (high - 2, left + 2)]

    def two() -> None:
        if job.rank == victim:
            for corner in corners:
                flip(job.landed, one, corner, 31)

    with damage(two), pytest.raises(WeightSyncError) as caught:
        job.update()
    assert named(caught.value) == [(victim, "1.down", Box.of((low + 3, high - 1), (left + 1, left + 3)))]
    assert right - left > 3


def four_ranks(pairs: dict[str, tuple[ModelLayout, ModelLayout]]) -> None:
    turn.BAND_ELEMENTS = 8  # the toy's tensors are small, and would be checked whole
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    everyone = factory.cpu_group([(0, 1, 2, 3)])
    hundred_flips(everyone, *pairs["fp32"], seed=1, count=60)
    hundred_flips(everyone, *pairs["bf16"], seed=2, count=40)
    flips_on_the_way(everyone, *pairs["fp32"])
    quarantine(everyone, *pairs["fp32"])
    many_wrong(everyone, *pairs["fp32"])
