"""Hosts of one engine on two machines, as far as they can tell: each ends when the other does, and says why."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.multi_host.company import follow
from rlhf.rollout.sglang.multi_host.meeting import open_meeting
from rlhf.rollout.sglang.wire import Meeting, Order, Party

TITLES = ("node 0 (host a)", "node 1 (host b)")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[HostProcess, HostProcess]]:
    """The leader's and the other one's, started at the same time."""
    listening, meeting = open_meeting("127.0.0.1")
    made: dict[int, HostProcess] = {}

    def start(node: int, party: Party, entry: str, *files: int) -> None:
        (folder := tmp_path / str(node)).mkdir()
        made[node] = HostProcess(
            Order(parent=os.getpid(), server_args={}, cpu=True, party=party),
            python="",
            environment=dict(os.environ),
            folder=folder,
            log_path=folder / f"engine_{node}.log",
            start_limit_s=60.0,
            reply_limit_s=60.0,
            entry=f"tests.rollout.sglang.multi_host.company_hosts:{entry}",
            open_files=files,
        )

    with listening:
        follower = threading.Thread(target=start, args=(1, Party(1, TITLES, meeting), "follows"))
        follower.start()
        first = Party(0, TITLES, meeting, listening.fileno())
        start(0, first, "leads", listening.fileno())
        follower.join()
    yield made[0], made[1]
    for host in made.values():
        host.close()


def scheduler_of(log: Path) -> int:
    return int(log.read_text().split()[1])


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "is stopped (state T)")]
)
def test_a_scheduler_that_dies_or_is_stopped_on_another_host_ends_both_hosts_and_is_named(hosts, tmp_path, number, how):
    leader, member = hosts
    pid = scheduler_of(tmp_path / "1" / "engine_1.log")
    os.kill(pid, number)
    lost = f"{TITLES[1]}: scheduler tp 1 (pid {pid}) {how}"
    with pytest.raises(
        EngineLostError, match=re.escape(f"part of its engine is lost: {lost} while it was at generate")
    ):
        leader.call("generate")
    assert f"scheduler tp 1 (pid {pid}) {how}" in member.witness()
    assert psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=5)[1] == []


def test_a_host_that_dies_ends_the_leaders_which_names_it(hosts):
    leader, member = hosts
    os.kill(member.pid, signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"part of its engine is lost: node 1 \(host b\): its host is gone"):
        leader.call("generate")
    assert member.witness() == f"host (pid {member.pid}) was ended by SIGKILL"


def test_a_host_that_is_stopped_ends_the_leaders_which_names_it(hosts):
    leader, member = hosts
    os.kill(member.pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError, match=r"node 1 \(host b\): its host has given no sign of life for 5 s"):
        leader.call("generate")
    assert member.witness() == f"host (pid {member.pid}) is stopped (state T)"


def test_the_leaders_host_takes_the_others_with_it(hosts, tmp_path):
    leader, member = hosts
    scheduler = psutil.Process(scheduler_of(tmp_path / "1" / "engine_1.log"))
    os.kill(leader.pid, signal.SIGKILL)
    assert "part of its engine is lost: node 0 (host a): its host is gone" in member.witness()
    assert leader.witness() == f"host (pid {leader.pid}) was ended by SIGKILL"
    member.close()
    psutil.wait_procs([scheduler], timeout=5)
    assert not scheduler.is_running()


def test_a_host_that_does_not_get_through_says_to_where():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        threading.Thread(target=lambda: listening.accept()[0].close(), daemon=True).start()
        with pytest.raises(
            EngineError,
            match=rf"{re.escape(TITLES[1])} did not get .*{re.escape(TITLES[0])} at 127.0.0.1:{port} \(Conn",
        ):
            follow(Party(1, TITLES, Meeting("127.0.0.1", port, "secret")))
