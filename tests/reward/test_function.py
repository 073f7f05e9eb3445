import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlhf.config.data import RewardConfig
from rlhf.data.record import PromptRecord
from rlhf.errors import ConfigError, RewardError
from rlhf.reward.function import RewardFunction
from tests.reward.functions import Shuffled

ACT = "tests.reward.functions:act"
RECORD = PromptRecord("prompt", "answer", {"k": [1, 2]})


@pytest.fixture(scope="module")
def reward():
    with RewardFunction(RewardConfig(function=ACT, timeout_s=1.5, workers=2)) as function:
        yield function


def score(function, *texts):
    return function.score([RECORD] * len(texts), texts)


def gone(pid: int) -> bool:
    """No such process, or only its zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids, limit_s):
    end = time.monotonic() + limit_s
    while not all(gone(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return all(gone(pid) for pid in pids)


def test_results_keep_the_order_of_the_rows(reward):
    results = score(reward, *(str(i) for i in range(200)))
    assert [result.score for result in results] == list(range(200))
    assert not any(result.error for result in results)


def test_no_rows_give_no_results(reward):
    assert score(reward) == []


def test_what_may_be_returned(reward):
    true, parts, answer = score(reward, "true", "parts", "answer answer")
    assert (true.score, true.error) == (1.0, "")
    assert (parts.score, parts.parts) == (0.75, (("format", 0.25), ("answer", 0.5)))
    assert answer.score == 1.0


def test_a_reward_process_does_not_import_torch(reward):
    assert score(reward, "torch")[0].score == 0.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise this", r"raised KeyError: 'this' at functions\.py:\d+"),
        ("exit", r"raised SystemExit: 3"),
        ("not a number", r"raised ValueError: could not convert"),
        ("none", r"score is a NoneType"),
        ("text", r"score is a str \('0\.5'\); needs a number or a RewardResult"),
        ("nan", r"score is nan; needs a finite"),
        ("huge", r"score is 1e\+300; needs a finite"),
        ("bad_part", r"format is inf"),
        ("own_error", r"no verdict"),
        ("die", r"the reward process ended \(exit code 7\)"),
        ("segfault", r"the reward process ended \(signal SIGSEGV\)"),
        ("close", r"the reward process (closed its connection|ended)"),
        ("spin", r"no answer within 1\.5 s; it was at functions\.py:\d+ in _spin"),
        ("c_sleep", r"no answer within 1\.5 s; it was at functions\.py:\d+ in <lambda>"),
        ("regex", r"no answer within 1\.5 s; it was at functions\.py:\d+ in <lambda>"),
        ("stop", r"no answer within 1\.5 s"),
    ],
)
def test_a_failure_costs_its_own_row_alone(reward, text, error):
    results = score(reward, "1", text, "2", "3", "4")
    assert [result.score for result in results] == [1, 0, 2, 3, 4]
    assert re.match(error, results[1].error), results[1].error
    assert [bool(result.error) for result in results] == [False, True, False, False, False]


def test_many_hangs_leave_the_other_rows_their_scores(reward):
    results = score(reward, *(("regex" if i % 5 == 2 else str(i)) for i in range(15)))
    assert [result.score for result in results] == [0 if i % 5 == 2 else i for i in range(15)]


def test_what_it_prints_is_capped_and_lands_in_the_log(tmp_path):
    log = tmp_path / "reward.log"
    with RewardFunction(RewardConfig(function=ACT), log_path=log) as function:
        assert [result.score for result in score(function, "print", "print")] == [5.0, 5.0]
    assert 4 * 64 * 1024 <= log.stat().st_size < 4 * 66 * 1024


def test_what_a_hung_call_started_is_ended_with_it(reward, tmp_path):
    assert score(reward, f"child {tmp_path}/pid")[0].error
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 5)


def test_a_record_that_cannot_be_sent_costs_its_own_row(reward):
    results = reward.score([RECORD, PromptRecord("", "", {"f": lambda: 0}), RECORD], ["1", "2", "3"])
    assert [result.score for result in results] == [1, 0, 3]
    assert "cannot be sent" in results[1].error


def test_a_process_killed_between_calls_costs_no_row(reward):
    pids = {int(result.score) for result in score(reward, "pid", "pid", "pid")}
    for pid in pids:
        os.kill(pid, 9)
    assert wait_until_gone(pids, 5)
    assert [result.score for result in score(reward, "1", "2", "3")] == [1, 2, 3]


def test_waiting_ticks(reward):
    ticks = []
    reward.score([RECORD], ["spin"], tick=lambda: ticks.append(1))
    assert ticks


def test_policy_decides_what_a_failed_row_is():
    for policy, kept in (("drop", False), ("zero", True)):
        with RewardFunction(RewardConfig(function=ACT, on_error=policy)) as function:
            fine, failed = score(function, "1", "raise x")
            assert failed.score == 0
            assert (function.keeps(fine), function.keeps(failed)) == (True, kept)
    refused = pytest.raises(RewardError, match=r"raised KeyError: 'x' .*for the prompt 'prompt'")
    with RewardFunction(RewardConfig(function=ACT, on_error="fail")) as function, refused:
        score(function, "1", "raise x")


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("tests.reward.functions:missing", "has no attribute 'missing'"),
        ("tests.reward.nowhere:score", "No module named"),
        ("tests.reward.functions:ACTIONS", "is a dict, not a function"),
        ("nowhere/file.py:score", "no file nowhere/file.py"),
    ],
)
def test_a_wrong_path_is_refused_by_name(location, why):
    with pytest.raises(ConfigError, match=re.escape(location)) as raised:
        RewardFunction(RewardConfig(function=location))
    assert why in str(raised.value)


def test_a_module_that_cannot_be_imported_is_refused_with_its_error(tmp_path):
    for body, why in (
        ("import sys; sys.exit('stop here')", "SystemExit: stop here"),
        ("import os; os._exit(4)", "code 4"),
    ):
        (tmp_path / "broken.py").write_text(body)
        with pytest.raises(ConfigError, match=why):
            RewardFunction(RewardConfig(function=f"{tmp_path}/broken.py:score"))


def test_a_file_path_works_without_a_package(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    word: str\n"
        "def score(record, text):\n    return text.count(Rule('a').word) / len(text)\n"
    )
    with RewardFunction(RewardConfig(function=f"{tmp_path}/mine.py:score")) as function:
        assert score(function, "banana")[0].score == 0.5


def test_shuffled_scores_have_the_same_mean_and_know_nothing_of_the_response():
    score = Shuffled(lambda record, text: float(text))
    texts = [str(int(random.Random(i).random() < 0.3)) for i in range(3000)]
    scores = torch.tensor([score(RECORD, text) for text in texts])
    true = torch.tensor([float(text) for text in texts])
    # Standard errors over 3000 draws: 0.008 of the mean, 0.018 of the correlation.
    assert abs(float(scores.mean() - true.mean())) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([scores, true]))[0, 1])) < 0.08


PARENT = """
import sys
from rlhf.config.data import RewardConfig
from rlhf.data.record import PromptRecord
from rlhf.reward.function import RewardFunction
record = PromptRecord("", "", {})
function = RewardFunction(RewardConfig(function="tests.reward.functions:act", timeout_s=2.0, workers=2))
function.score([record] * 4, ["1"] * 4)
print(*(process.process.pid for process in function.processes), flush=True)
function.score([record], ["regex"]) if sys.argv[1] == "busy" else sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_processes_end_when_their_rank_is_killed(state):
    repo = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], cwd=repo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(gone(pid) for pid in pids)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids, 20)  # timeout_s, and room for a busy machine
