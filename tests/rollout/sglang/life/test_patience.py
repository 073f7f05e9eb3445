"""Waits that are added up look by look, so that time in which a whole job was frozen is no wait."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rlhf.rollout.sglang.life.board import read_entries
from rlhf.rollout.sglang.life.patience import LONGEST_GAP_S, Patience
from tests.rollout.sglang.fake_hosts import ROLES

LEADER = """
import sys
from pathlib import Path
from rlhf.rollout.sglang.life import patience
from tests.rollout.sglang.life.test_process import start
patience.LONGEST_GAP_S = 0.75
host = start(Path(sys.argv[1]), "with_children", limit_s=1.5)
print("ready", flush=True)
print(host.call("nap", 1.0), flush=True)
host.tell("nap", 1.0)
while not (heard := host.hear(0.1, verb="nap")): pass
print(heard[0].value, flush=True)
host.close()
"""
"""A leader rank whose host may take 1.5 s for an answer, and takes 1."""


def clock_of(*seconds: float):
    return iter(seconds).__next__


def test_short_looks_add_up_to_the_limit_and_no_further():
    patience = Patience(1.0, clock=clock_of(5.0, 5.5, 6.0, 6.25))
    assert [patience.is_over() for _ in range(3)] == [False, False, True]


def test_a_pause_between_two_looks_counts_as_one_long_look():
    patience = Patience(3.0, clock=clock_of(0.0, 0.5, 4000.0, 4000.25, 4000.5, 4000.8))
    assert [patience.is_over() for _ in range(2)] == [False, False]
    assert patience.was_held_up
    assert patience.waited_s == 0.5 + LONGEST_GAP_S
    assert [patience.is_over() for _ in range(3)] == [False, False, True]
    assert not patience.was_held_up


def test_a_wait_that_begins_anew_has_all_its_time():
    patience = Patience(1.0, clock=clock_of(0.0, 0.9, 1.0, 1.9, 2.1))
    assert not patience.is_over()
    patience.begin_anew()
    assert [patience.is_over(), patience.is_over()] == [False, True]


def test_a_job_that_was_frozen_as_a_whole_for_longer_than_an_answer_may_take_goes_on(tmp_path: Path):
    """While the leader rank waits for an answer, and while it hears messages; it goes on before the others do."""
    with subprocess.Popen([sys.executable, "-c", LEADER, tmp_path], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout.readline() == "ready\n"
        for _ in range(2):
            time.sleep(0.3)
            pids = [entry.pid for entry in read_entries(tmp_path)]
            assert len(pids) == 1 + len(ROLES)
            assert all(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in pids)
            for pid in (*pids, leader.pid):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2.5)
            for pid in (leader.pid, *pids):
                os.kill(pid, signal.SIGCONT)
            assert leader.stdout.readline() == "(1.0,)\n"
        assert leader.wait() == 0
