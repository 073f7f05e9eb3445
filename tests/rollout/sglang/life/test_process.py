"""The leader rank's dealings with a host process that answers, fails, hangs or dies; no SGLang is needed."""

import os
import time
import venv
from pathlib import Path

import psutil
import pytest

from rlhf.errors import EngineError
from rlhf.rollout.sglang.life import process
from rlhf.rollout.sglang.life.process import HostProcess
from rlhf.rollout.sglang.wire import Beat, Order, Reply


def start(folder: Path, entry: str = "answers", *, limit_s: float = 1.0, **changes: object) -> HostProcess:
    """A fake host; `changes` go to HostProcess."""
    plain = {"start_limit_s": 30.0, "reply_limit_s": limit_s, "environment": dict(os.environ), "python": ""}
    settings = plain | changes
    return HostProcess(
        Order(parent=os.getpid(), server_args={}, cpu=True),
        folder=folder,
        log_path=folder / "engine_0.log",
        entry=f"tests.rollout.sglang.fake_hosts:{entry}",
        **settings,
    )


def hear_until(host, verb, heard, is_enough):
    while not is_enough():
        heard += host.hear(0.1, verb=verb)


def test_an_answer_comes_back_and_an_error_leaves_the_host_alive(tmp_path):
    host = start(tmp_path)
    assert host.call("echo", 3, "x")[0] == (3, "x")
    with pytest.raises(EngineError, match=r"engine_0: fail: ValueError: as asked"):
        host.call("fail")
    assert host.call("echo", 4)[0] == (4,)
    host.close()


def test_a_host_of_another_environment_has_that_ones_packages_and_only_our_own_beside_them(tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("WORD = 'there'")
    host = start(tmp_path, "elsewhere", python=str(tmp_path / "other" / "bin" / "python"))
    assert host.call("import", "only_there", "torch", "rlhf.errors") == [True, False, True]
    host.close()
    host = start(tmp_path, "elsewhere")
    assert host.call("import", "only_there", "torch", "rlhf.errors") == [False, True, True]
    host.close()


def test_signs_of_life_set_the_clock_back_and_are_passed_on(tmp_path):
    host, heard = start(tmp_path, limit_s=1.2), []
    host.tell("slow", 1)
    hear_until(host, "slow", heard, lambda: any(isinstance(one, Reply) for one in heard))
    assert heard[:3] == [Beat(0), Beat(1), Beat(2)]
    time.sleep(1.3)
    host.tell("echo")
    host.hear(0.01, verb="echo")  # its time begins where it is asked
    time.sleep(1.3)
    host.hear(0.01, verb="")  # it should be at nothing
    with pytest.raises(EngineError, match=r"engine_0: its host process has said nothing for 1.2 s while it was at it"):
        hear_until(host, "it", [], lambda: False)
    with pytest.raises(EngineError, match="its processes have ended"):
        host.tell("slow", 1)


def test_a_host_that_dies_while_it_is_heard_is_named(tmp_path):
    host = start(tmp_path, limit_s=60.0)
    host.tell("die")
    message = r"(?s)host \(pid \d+\) was ended by SIGKILL while it was at die.*the last words"
    with pytest.raises(EngineError, match=message):
        hear_until(host, "die", [], lambda: False)
    assert not host.is_open


def test_a_host_that_says_nothing_is_killed_and_named(tmp_path):
    host = start(tmp_path)
    itself = psutil.Process(host.pid)
    with pytest.raises(EngineError, match=r"engine_0: its host process has said nothing for 1 s while it was at hang"):
        host.call("hang")
    assert not itself.is_running()
    with pytest.raises(EngineError, match="its processes have ended"):
        host.call("echo")


def test_a_host_that_dies_is_named_with_its_exit_code_and_last_words(tmp_path):
    host = start(tmp_path, limit_s=60.0)
    with pytest.raises(
        EngineError, match=r"(?s)host \(pid \d+\) was ended by SIGKILL while it was at die.*the last words"
    ):
        host.call("die")


@pytest.mark.parametrize(
    ("entry", "limit_s", "message"),
    [
        ("never_ready", 1.0, "has said nothing for 1 s while it was at start"),
        ("refuses", 60.0, "start: RuntimeError: no such model"),
        ("crashes", 60.0, r"(?s)host \(pid \d+\) left with 1 while it was at start.*a broken import"),
    ],
)
def test_a_host_that_does_not_start_says_why_and_is_gone(tmp_path, entry, limit_s, message):
    before = set(psutil.Process().children())
    with pytest.raises(EngineError, match=message):
        start(tmp_path, entry, start_limit_s=limit_s)
    assert set(psutil.Process().children()) <= before


def test_a_host_that_is_gone_is_not_ended_again_by_a_pid_that_may_be_anothers(tmp_path, monkeypatch):
    host, ended = start(tmp_path), []
    host.close()
    monkeypatch.setattr(process, "end_tree", ended.append)
    host.close()
    assert ended == []


def test_close_ends_what_the_host_began_and_no_other_child(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    children = [psutil.Process(host.call("echo")[1]) for host in (first, second)]
    first.close()
    first.close()
    assert not psutil.pid_exists(first.pid)
    assert not children[0].is_running()
    assert children[1].is_running()
    assert second.call("echo", 1)[0] == (1,)
    second.close()
    assert not children[1].is_running()
