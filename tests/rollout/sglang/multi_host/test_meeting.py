"""How schedulers meet, without SGLang."""

import queue
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf.rollout.sglang.multi_host.meeting import (
    environment_on_one_host,
    environment_on_several_hosts,
    meet_by_token,
    meeting_place,
    open_meeting,
)
from rlhf.rollout.sglang.multi_host.store import GuardedStore, Line, StoreServer


def test_an_engine_on_one_host_meets_in_its_folder_and_listens_on_loopback_whatever_the_job_has_chosen(tmp_path: Path):
    found = environment_on_one_host(tmp_path)
    assert found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/meeting"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"


def test_an_engine_on_several_hosts_meets_by_a_token_that_only_its_folder_holds(tmp_path: Path):
    listening, meeting = open_meeting("127.0.0.1")
    with listening:
        StoreServer(listening, meeting.token, on_lost=lambda *_: None)
        found = environment_on_several_hosts(tmp_path, meeting)
        assert not [name for name in found if name.endswith("IFNAME")]  # those of the job stay
        assert len(meeting.token) == 64
        assert meeting.token not in str(found) + repr(meeting)
        assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
        sealed_by: list[str] = []
        meet_by_token(sealed_by.append)
        store, rank, world_size = next(
            dist.rendezvous(found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"], rank=1, world_size=2)
        )
        assert (rank, world_size) == (1, 2)
        assert sealed_by == [meeting.token]
        store.set("a", "b")
        assert store.get("a") == b"b"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6 in the kernel")
def test_hosts_also_meet_at_an_ipv6_address():
    listening, meeting = open_meeting("::1")
    with listening:
        lost = queue.Queue()
        StoreServer(listening, meeting.token, on_lost=lambda *told: lost.put(told))
        assert meeting_place(meeting) == f"[::1]:{meeting.port}"  # as SGLang reads it
        where = (meeting.address, meeting.port, meeting.token)
        store = GuardedStore(*where)
        store.set("a", "b")
        assert store.get("a") == b"b"
        Line(*where, name="host b").last_word("through")
        assert lost.get(timeout=10) == ("host b", "through")
