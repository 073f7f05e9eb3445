"""Groups, agreement, clocks and stop requests over gloo; all facts in one spawn."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.dist.agree import agree, all_of, any_of, first_does, from_first, gather, max_of, min_of, sum_of
from rlhf.dist.clocks import ClockReading, compare_clocks
from rlhf.dist.grid import Grid
from rlhf.dist.groups import GroupFactory
from rlhf.dist.stop_request import StopRequest
from rlhf.errors import AgreementError, DataError
from tests.harness.ranks import run_ranks


def groups_join_the_ranks_of_an_axis(factory: GroupFactory) -> None:
    rank, grid = dist.get_rank(), Grid(("tp", "dp"), (2, 1), first_rank=1)
    tp = factory.cpu_group(grid.groups("tp"))
    assert (tp is None) == (rank not in (1, 2))
    if tp is not None:
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=tp)
        assert float(total) == 110.0


def a_set_of_ranks_gets_one_group(factory: GroupFactory) -> None:
    first = factory.cpu_group([(0, 2), (1, 3)])
    assert factory.cpu_group([(3, 1), (2, 0)]) is first
    assert factory.device_group([(0, 2), (1, 3)]) is first  # gloo is the device backend here
    assert dist.get_process_group_ranks(first) == ([0, 2] if dist.get_rank() in (0, 2) else [1, 3])


def values_are_settled_in_the_group_alone(factory: GroupFactory) -> None:
    rank = dist.get_rank()
    pair = factory.cpu_group([(0, 2), (1, 3)])
    assert gather(f"r{rank}", pair) == (["r0", "r2"] if rank % 2 == 0 else ["r1", "r3"])
    assert from_first(rank * 10, pair) == (rank % 2) * 10
    assert any_of(rank == 3, pair) == (rank in (1, 3))
    assert all_of(rank != 3, pair) == (rank in (0, 2))
    assert sum_of(0.1 * rank, pair) == pytest.approx(0.2 if rank % 2 == 0 else 0.4, rel=1e-15)  # float64
    assert (min_of(rank, pair), max_of(rank, pair)) == ((0, 2) if rank % 2 == 0 else (1, 3))


def what_the_first_rank_finds_or_raises_all_do(factory: GroupFactory) -> None:
    rank, pair = dist.get_rank(), factory.cpu_group([(0, 2), (1, 3)])
    done = []
    assert first_does(lambda: done.append(rank) or rank, pair) == rank % 2
    assert done == ([rank] if rank < 2 else [])

    def look() -> None:
        raise DataError(f"seen by {rank}")

    with pytest.raises(DataError, match=f"seen by {rank % 2}"):
        first_does(look, pair)


def unequal_values_are_named_with_their_ranks(factory: GroupFactory) -> None:
    rank = dist.get_rank()
    some = factory.cpu_group([(0, 1, 3)])
    if some is not None:
        assert agree(("a", 1), some) == ("a", 1)
        with pytest.raises(AgreementError, match=r"num_steps: the ranks hold 5 on ranks \[0, 1\]; 8 on ranks \[3\]"):
            agree(8 if rank == 3 else 5, some, what="num_steps")


def a_stop_file_seen_by_one_rank_stops_all(factory: GroupFactory, folder: str) -> None:
    rank = dist.get_rank()
    everyone = factory.cpu_group([(0, 1, 2, 3)])
    own = Path(folder) / str(rank)  # as on hosts without a shared file system
    own.mkdir()
    stop = StopRequest(own)
    assert not stop.agreed(everyone)
    assert not stop.accepted
    if rank == 2:
        (own / "stop").touch()
    assert stop.agreed(everyone)
    assert stop.accepted


def clocks_of_hosts_are_compared_within_the_stated_error(factory: GroupFactory) -> None:
    hosts, ahead = ("a", "b", "c", "b"), {"a": 0.0, "b": 1000.0, "c": -0.25}
    mine = ahead[hosts[dist.get_rank()]]
    everyone = factory.cpu_group([(0, 1, 2, 3)])
    readings = compare_clocks(hosts[dist.get_rank()], everyone, clock=lambda: time.monotonic() + mine)
    assert readings[0] == ClockReading(0.0, 0.0)
    assert readings[1] == readings[3]
    for host, reading in zip(hosts, readings, strict=True):
        assert abs(reading.ahead_s - ahead[host]) <= reading.error_s + 1e-9  # a proof, but for rounding
        assert (reading.error_s > 0) == (host != "a")


def all_facts(folder: str) -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    groups_join_the_ranks_of_an_axis(factory)
    a_set_of_ranks_gets_one_group(factory)
    values_are_settled_in_the_group_alone(factory)
    what_the_first_rank_finds_or_raises_all_do(factory)
    unequal_values_are_named_with_their_ranks(factory)
    clocks_of_hosts_are_compared_within_the_stated_error(factory)
    a_stop_file_seen_by_one_rank_stops_all(factory, folder)


@pytest.mark.dist
def test_groups_agreement_clocks_and_stop_requests(tmp_path: Path) -> None:
    run_ranks(4, all_facts, str(tmp_path))
