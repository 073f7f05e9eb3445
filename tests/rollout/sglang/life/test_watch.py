"""An engine's processes that die, stop or hang, whichever it is: found, named, and all ended. No SGLang is needed."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.life import watch
from rlhf.rollout.sglang.life.board import read_entries, stat_of, write_end
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.life.watch import EngineWatch, Watched
from tests.rollout.sglang.fake_hosts import ROLES
from tests.rollout.sglang.life.test_process import start

HOSTS = ("host", *ROLES)
SOON_S = 10.0
"""Far below the 30 s that are promised; a machine under load needs some."""


@pytest.fixture
def host(tmp_path):
    made = start(tmp_path, "with_children", limit_s=600.0)
    yield made
    made.close()


def pid_of(role: str, folder: Path) -> int:
    return next(entry.pid for entry in read_entries(folder) if entry.role == role)


def lose(host: HostProcess, verb: str = "generate", **changes: bool) -> tuple[str, float]:
    """What the leader is told, and after how many seconds."""
    tree = [psutil.Process(entry.pid) for entry in read_entries(host._watch.folder) if psutil.pid_exists(entry.pid)]
    began = time.monotonic()
    with pytest.raises(EngineLostError) as caught:
        host.call(verb, **changes)
    assert not [process for process in tree if process.is_running()]
    with pytest.raises(EngineLostError, match="its processes have ended"):
        host.call("echo")
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("role", HOSTS)
def test_a_process_that_was_killed_is_named_with_its_signal(host, tmp_path, role):
    pid = pid_of(role, tmp_path)
    os.kill(pid, signal.SIGKILL)
    text, seconds = lose(host)
    assert f"engine_0: {role} (pid {pid}) was ended by SIGKILL while it was at generate" in text
    assert seconds < SOON_S


@pytest.mark.parametrize(("role", "patient"), [*((role, False) for role in HOSTS), ("scheduler tp 0", True)])
def test_a_process_that_was_stopped_is_named_also_while_it_may_rest(host, tmp_path, role, patient):
    pid = pid_of(role, tmp_path)
    os.kill(pid, signal.SIGSTOP)
    text, seconds = lose(host, patient=patient)
    assert f"engine_0: {role} (pid {pid}) is stopped (state T)" in text
    assert seconds < SOON_S


def test_a_scheduler_that_does_not_move_hangs_unless_it_may_rest(host, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 2.0)
    pid = pid_of("scheduler tp 1", tmp_path)
    os.kill(pid, signal.SIGUSR1)
    assert host.call("echo", 1) == (1,)
    text, seconds = lose(host)
    assert f"scheduler tp 1 (pid {pid}) hangs: it has not moved for 2 s" in text
    assert seconds < SOON_S


def test_a_scheduler_that_computes_is_alive_however_long_its_round_takes(host, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 1.0)
    os.kill(pid_of("scheduler tp 0", tmp_path), signal.SIGUSR2)
    seen = host._watch
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert seen.fault(should_move=True) == ""
        time.sleep(0.3)


def test_what_ended_first_is_to_blame_whatever_followed(host, tmp_path):
    first, second = (pid_of(role, tmp_path) for role in ("detokenizer", "host"))
    os.kill(first, signal.SIGTERM)
    until = time.monotonic() + SOON_S
    while not EngineWatch(tmp_path).first_end() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(second, signal.SIGKILL)
    assert f"detokenizer (pid {first}) was ended by SIGTERM" in lose(host)[0]


def test_an_exception_is_told_by_the_process_that_raised_it(host, tmp_path):
    pid = pid_of("scheduler tp 1", tmp_path)
    write_end(pid, "raised ValueError: no room", tmp_path)
    write_end(pid, "left with 1", tmp_path)
    os.kill(pid_of("host", tmp_path), signal.SIGKILL)
    assert f"scheduler tp 1 (pid {pid}) raised ValueError: no room" in lose(host)[0]


def test_a_scheduler_that_dies_while_the_engine_starts_is_named(tmp_path):
    with pytest.raises(EngineLostError, match=r"scheduler tp 0 \(pid \d+\) was ended by SIGKILL while it was at start"):
        start(tmp_path, "dies_while_it_starts")


def test_a_pid_that_belongs_to_another_process_by_now_is_a_death():
    pid = os.getpid()
    assert Watched("me", pid, stat_of(pid)[1]).fault() == ""
    assert Watched("me", pid, stat_of(pid)[1] - 1).fault() == "me died"


def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 15.0)
    pid, now = os.getpid(), iter([0.0, 0.5, 4000.0, 4000.5, 4001.0])
    watched = Watched("me", pid, stat_of(pid)[1], clock=now.__next__)
    monkeypatch.setattr(watch, "stat_of", lambda _: ("S", watched._born, 1.0))
    assert [watched.fault(7) for _ in range(4)] == [""] * 4


def test_an_error_that_a_living_engine_reports_is_no_loss(tmp_path):
    host = start(tmp_path)
    with pytest.raises(EngineError) as caught:
        host.call("fail")
    assert not isinstance(caught.value, EngineLostError)
    host.close()
