"""An engine's processes that die, stop or hang, whichever it is: found, named, and all ended. No SGLang is needed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.errors import EngineError, EngineLostError
from rlhf.rollout.sglang.life import board, watch
from rlhf.rollout.sglang.life.board import read_ends, read_entries, stat_of, write_end
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


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def lose(host: HostProcess, verb: str = "generate", **changes: bool) -> tuple[str, float]:
    """What the leader is told, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(EngineLostError) as caught:
        host.call(verb, **changes)
    assert host.pids == []
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


def test_a_scheduler_that_waits_for_one_that_computes_is_not_to_blame(host, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 1.0)
    os.kill(pid_of("scheduler tp 0", tmp_path), signal.SIGHUP)
    os.kill(pid_of("scheduler tp 1", tmp_path), signal.SIGUSR2)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert host._watch.fault(should_move=True) == ""
        time.sleep(0.3)


@pytest.mark.parametrize("hangs", [0, 1])
def test_of_two_that_do_nothing_the_one_that_waits_for_no_other_is_to_blame(host, tmp_path, monkeypatch, hangs):
    """A scheduler in an endless sleep, and its sibling in a collective with it."""
    monkeypatch.setattr(watch, "STILL_S", 1.0)
    pids = [pid_of(role, tmp_path) for role in ROLES]
    os.kill(pids[1 - hangs], signal.SIGHUP)
    time.sleep(1.0)  # it waits for longer than the other hangs
    os.kill(pids[hangs], signal.SIGUSR1)
    text, seconds = lose(host)
    assert f"{ROLES[hangs]} (pid {pids[hangs]}) hangs: it has not moved for 1 s" in text
    assert seconds < SOON_S


def test_schedulers_that_all_wait_for_one_another_are_named_together(host, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 1.0)
    for role in ROLES:
        os.kill(pid_of(role, tmp_path), signal.SIGHUP)
    message = r"scheduler tp \d \(pid \d+\) and scheduler tp \d \(pid \d+\): all have waited for others"
    assert re.search(message, lose(host)[0])


def test_what_ended_first_is_to_blame_whatever_followed(host, tmp_path):
    first, second = (pid_of(role, tmp_path) for role in ("scheduler tp 1", "host"))
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: EngineWatch(tmp_path).first_end() != "")
    os.kill(second, signal.SIGKILL)
    assert f"scheduler tp 1 (pid {first}) was ended by SIGTERM" in lose(host)[0]


def test_what_a_process_raises_because_another_was_killed_is_not_to_blame(tmp_path):
    """Also where the host sees the death later than the sibling that was connected to it."""
    host = start(tmp_path, "with_children_under_load", limit_s=600.0)
    pid = pid_of("scheduler tp 1", tmp_path)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(read_ends(tmp_path)) == 2)  # the leader rank is at something else
    ends = {end.pid: end.how for end in read_ends(tmp_path)}
    assert ends[pid_of("scheduler tp 0", tmp_path)] == "raised RuntimeError: connection closed by peer"
    assert f"scheduler tp 1 (pid {pid}) was ended by SIGKILL" in lose(host)[0]


def test_who_is_ended_on_anothers_account_ends_after_there_is_word_of_it(tmp_path, monkeypatch):
    """Also where the thread that awaits the first one's end is slow."""
    enters = "import sys, time, pathlib; from rlhf.rollout.sglang.life.board import Pulse; "
    enters += "Pulse(sys.argv[1], pathlib.Path(sys.argv[2])); time.sleep(600)"
    first, second = (subprocess.Popen([sys.executable, "-c", enters, role, tmp_path]) for role in ("first", "second"))
    plain = board.write_end

    def slow(pid: int, how: str, folder: Path) -> None:
        time.sleep(0.2 if pid == first.pid else 0.0)
        plain(pid, how, folder)

    monkeypatch.setattr(board, "write_end", slow)
    board.watch_children(tmp_path, every_s=0.01)
    wait_until(lambda: len(read_entries(tmp_path)) == 2)
    time.sleep(0.2)
    first.kill()
    board.after_the_dead(second.kill)()
    wait_until(lambda: len(read_ends(tmp_path)) == 2)
    assert [process.wait() for process in (first, second)] == [-signal.SIGKILL] * 2
    assert EngineWatch(tmp_path).first_end() == f"first (pid {first.pid}) was ended by SIGKILL"


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


def looks_at_myself(monkeypatch, seconds: tuple[float, ...], state: Callable[[], str]) -> list[str]:
    """What is wrong with this process, which does nothing, at these times."""
    now, pid = [0.0], os.getpid()
    watched = Watched("me", pid, stat_of(pid)[1], clock=lambda: now[0])
    monkeypatch.setattr(watch, "stat_of", lambda _: (state(), watched._born, 1.0))
    found = []
    for now[0] in seconds:
        found.append(watched.fault(7))
    return found


def test_processes_that_are_found_stopped_after_a_pause_of_the_watcher_get_another_look(monkeypatch):
    """The whole job was stopped, and this process goes on first."""
    states = iter("TTSTT")
    found = looks_at_myself(monkeypatch, (0.5, 600.0, 600.5, 601.0, 601.5), lambda: next(states))
    assert found == ["", "", "", "", "me is stopped (state T)"]


def test_time_in_which_nobody_looked_does_not_count(monkeypatch):
    monkeypatch.setattr(watch, "STILL_S", 15.0)
    assert looks_at_myself(monkeypatch, (0.5, 4000.0, 4000.5, 4001.0), lambda: "S") == [""] * 4


def test_an_error_that_a_living_engine_reports_is_no_loss(tmp_path):
    host = start(tmp_path)
    with pytest.raises(EngineError) as caught:
        host.call("fail")
    assert not isinstance(caught.value, EngineLostError)
    host.close()
