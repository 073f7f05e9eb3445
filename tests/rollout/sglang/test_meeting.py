"""How schedulers meet, without SGLang."""

from pathlib import Path

from rlhf.rollout.sglang.meeting import environment_on_one_host


def test_an_engine_on_one_host_meets_in_its_folder_and_listens_on_loopback_whatever_the_job_has_chosen(tmp_path: Path):
    found = environment_on_one_host(tmp_path)
    assert found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{tmp_path}/meeting"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
