"""What schedulers tell of themselves, without SGLang around them."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.rollout.sglang.inside.entries import _tell_waits
from rlhf.rollout.sglang.life.board import Pulse, read_entries
from tests.harness.ranks import run_ranks

COLLECTIVES = (
    lambda group: dist.all_reduce(torch.ones(3), group=group),
    lambda group: dist.broadcast_object_list([dist.get_rank()], 1, group=group),
    lambda group: dist.barrier(group=group),
)
"""Of host memory, as SGLang calls them."""


def _waits(folder: Path) -> None:
    group, plain = dist.new_group([0, 1], backend="gloo"), dist.Work.wait
    if dist.get_rank() == 1:
        for number, collective in enumerate(COLLECTIVES):
            until = time.monotonic() + 30.0
            while not (folder / f"told_{number}").exists() and time.monotonic() < until:
                time.sleep(0.01)
            collective(group)
            dist.barrier(group)
        return
    pulse, seen = Pulse("scheduler tp 0", folder), list[bool]()

    def await_word(number: int) -> None:
        until = time.monotonic() + 20.0
        while not read_entries(folder)[0].awaits and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(read_entries(folder)[0].awaits)
        (folder / f"told_{number}").touch()

    try:
        _tell_waits(pulse)
        for number, collective in enumerate(COLLECTIVES):
            pulse.beat()
            assert not read_entries(folder)[0].awaits
            watching = threading.Thread(target=await_word, args=(number,))
            watching.start()
            collective(group)
            assert not read_entries(folder)[0].awaits
            watching.join()
            dist.barrier(group)
    finally:
        dist.Work.wait = plain
    assert seen == [True] * len(COLLECTIVES)
    assert read_entries(folder)[0].pulse == len(COLLECTIVES)


@pytest.mark.dist
def test_a_scheduler_in_a_collective_says_that_it_waits_for_others(tmp_path: Path) -> None:
    run_ranks(2, _waits, tmp_path)
