"""How schedulers meet, without SGLang."""

from pathlib import Path

import torch.distributed as dist

from rlhf.rollout.sglang.multi_host.meeting import (
    environment_on_one_host,
    environment_on_several_hosts,
    meet_by_token,
    open_meeting,
)
from rlhf.rollout.sglang.multi_host.store import StoreServer


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
        meet_by_token()
        store, rank, world_size = next(
            dist.rendezvous(found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"], rank=1, world_size=2)
        )
        assert (rank, world_size) == (1, 2)
        store.set("a", "b")
        assert store.get("a") == b"b"
