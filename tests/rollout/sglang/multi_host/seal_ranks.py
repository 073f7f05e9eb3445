"""What the ranks of the test of seals do, in processes that end: functions of torch and SGLang stay taken over there.

Arguments: a file to meet by, and one that forged pickles would create.
"""

import multiprocessing
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.errors import EngineError
from rlhf.rollout.sglang.cpu import install_cpu_shim
from rlhf.rollout.sglang.multi_host.seals import seal_pickles


class Evil:
    """Unpickled, it creates a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path(self._path),)


def refused(call: Callable[[], object], what: str) -> None:
    """It raises, and says why."""
    with pytest.raises(EngineError, match=re.escape(what)):
        call()


def raw_broadcast(body: bytes, src: int) -> None:
    """As SGLang and torch send pickles: how many bytes, and these."""
    dist.broadcast(torch.tensor([len(body)]), src=src)
    dist.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), src=src)


def members_understand_one_another(rank: int) -> None:
    """By all ways that torch's object collectives and SGLang's schedulers have."""
    from sglang.srt.distributed.communication_op import broadcast_pyobj  # there by name before it was taken over

    pair = dist.new_group([1, 2])
    for turn in range(3):
        said = {"turn": turn, "from": rank, "long": "x" * 1000 * rank}
        everyone: list[object] = [None] * 3
        dist.all_gather_object(everyone, said)
        assert [one["from"] for one in everyone] == [0, 1, 2]
        gathered: list[object] | None = [None] * 3 if rank == 1 else None
        dist.gather_object(said, gathered, dst=1)
        assert gathered is None or [len(one["long"]) for one in gathered] == [0, 1000, 2000]
        told = [said, turn] if rank == 2 else [None, None]
        dist.broadcast_object_list(told, src=2)
        assert told[0]["from"] == 2
        got: list[object] = [None]
        dist.scatter_object_list(got, [[rank, to] for to in range(3)] if rank == 0 else None, src=0)
        assert got == [[0, rank]]
        if rank == 0:
            dist.send_object_list([said], dst=2)
        elif rank == 2:
            box = [None]
            dist.recv_object_list(box, src=0)
            assert box[0]["from"] == 0
        assert broadcast_pyobj([said] if rank == 1 else [], rank, None, src=1) == [
            said | {"from": 1, "long": "x" * 1000}
        ]
        assert broadcast_pyobj([], rank, src=0) == []
        if rank:
            assert broadcast_pyobj([turn, rank] if rank == 2 else [], rank, pair, src=2) == [turn, 2]


def strangers_are_refused(rank: int, evil: str) -> None:
    """Rank 2 sends what somebody without the token could: pickles as they are, and once more what it has heard."""
    import sglang.srt.utils.common as common

    forged = pickle.dumps([Evil(evil)])
    assert pickle.loads(pickle.dumps(Evil(evil))) is None  # it would
    Path(evil).unlink(missing_ok=True)
    if rank == 2:
        raw_broadcast(forged, 2)
    else:
        refused(lambda: dist.broadcast_object_list([None], src=2), "without a valid seal came over group '0'")
    heads = [dist.distributed_c10d._object_to_tensor(turn, "cpu", None)[0] for turn in (1, 2)]  # of rank 2, in time
    later, _ = heads[1], dist.broadcast(heads[1], src=2)
    again = later.numpy().tobytes()
    if rank == 2:
        raw_broadcast(again, 2)
        raw_broadcast(again, 2)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=2)
        assert box == [2]
        refused(lambda: dist.broadcast_object_list(box, src=2), "of rank 2 that came before")
    head = torch.zeros(52, dtype=torch.uint8)
    if rank == 2:
        dist.broadcast(torch.cat([head, torch.frombuffer(bytearray(forged), dtype=torch.uint8)])[:52], src=2)
    else:
        refused(lambda: common.broadcast_pyobj([], rank, src=2), "without a valid seal came over group '0'")
    refused(lambda: common.point_to_point_pyobj([], 0, None, 1, 0), "point_to_point_pyobj was called")
    assert not Path(evil).exists()
    dist.barrier()


def rank_of_three(rank: int, meeting: str, evil: str) -> None:
    seal_pickles("secret")
    seal_pickles("secret")  # changes nothing
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 3), rank=rank, world_size=3)
    members_understand_one_another(rank)
    strangers_are_refused(rank, f"{evil}_{rank}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    install_cpu_shim()
    from sglang.srt.distributed import communication_op  # noqa: F401  what takes seconds is imported once

    fork = multiprocessing.get_context("fork")  # before anything has threads
    ranks = [fork.Process(target=rank_of_three, args=(rank, *sys.argv[1:])) for rank in range(3)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    sys.exit([one.exitcode for one in ranks] != [0, 0, 0])
