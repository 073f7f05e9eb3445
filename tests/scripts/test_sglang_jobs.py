"""PPO with rollouts from SGLang, through the launcher: a run that is stopped and goes on, one whose engine's leader is
killed."""

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.rollout.sglang.tiny import needs_sglang
from tests.scripts.launched import LaunchedJob
from tools.quickstart import make_model_folder

pytestmark = [pytest.mark.dist, *needs_sglang]

SETTINGS = (
    *("actor.model.init=random", "critic.model.init=random", "reference.model.init=random"),
    *("actor.parallel.tp=2", "critic.parallel.pp=2", "reference.parallel.dp=2"),
    *("num_steps=2", "data.held_out=0", "job.torch_threads=1", "rollout.engine=sglang"),
)


def start(folder: Path, *settings: str, death: str) -> LaunchedJob:
    folder.mkdir(exist_ok=True)
    make_model_folder(folder / "model")
    config = ("configs/debug/ppo_tiny.yaml", "name=death", f"log.folder={folder}/runs")
    return LaunchedJob(
        folder,
        *("--module", "tests.scripts.ppo_death_worker"),
        *(*config, f"actor.model.path={folder}/model", *SETTINGS, *settings),
        nproc=2,
        env={"RLHF_TEST_DEATH": death},
    )


def check_nothing_left(job: LaunchedJob, console: str) -> None:
    """Job.end has looked for processes and torch's memory; these are SGLang's and ours."""
    assert "left-over" not in console  # the kernel was faster than the launcher's sweep
    pids = {str(process.pid) for process in job.seen}
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    names = [path for folder in folders for path in folder.iterdir() if path.name.startswith(("sgl", "rlhf_"))]
    assert not [path for path in names if pids & set(path.name.split("_"))]


def is_scheduler(process: psutil.Process) -> bool:
    try:
        return "sglang::scheduler" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_ppo_with_rollouts_of_the_trainers_logprobs_stops_and_goes_on(tmp_path: Path) -> None:
    """A stop while an engine's processes live: saved, all of them gone, and the next start has an engine of its own."""
    settings = ("rollout.tp=2", "num_steps=30")
    job = start(tmp_path / "run", *settings, death="9 nowhere SIGKILL")
    metrics = job.run_folder / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert all(launcher.poll() is None for launcher in job.launchers), job.console
        job.look()
        time.sleep(0.5)
    assert any(is_scheduler(process) for process in job.seen)
    os.kill(job.launcher.pid, signal.SIGUSR1)
    code, console, record = job.end(limit_s=240)
    assert (code, record["code"]) == (75, 75), console
    check_nothing_left(job, console)
    done = len(metrics.read_text().splitlines())
    assert done < 30

    job = start(tmp_path / "run", *settings, f"num_steps={done + 2}", death="9 nowhere SIGKILL")
    while all(launcher.poll() is None for launcher in job.launchers):
        job.look()
        time.sleep(0.5)
    code, console, _ = job.end(limit_s=240)
    assert code == 0, console
    assert f"resume: from step {done} of {done + 2}" in console
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, done + 3))
    assert all(step["mismatch/max"] < 1e-4 for step in steps)  # fp32; one wrong weight costs far more
    assert [step["sync/policy_version"] for step in steps] == list(range(done + 2))
    assert all(0 < step["rollout/first_token_p50_s"] <= step["rollout/latency_p95_s"] for step in steps)
    assert all(0 < step["rollout/utilisation"] <= 1 for step in steps)
    assert (job.run_folder / "logs" / "engine_0.log").exists()
    check_nothing_left(job, console)


def test_a_killed_leader_takes_its_engine_with_it(tmp_path: Path) -> None:
    """Rank 1 leads an engine of its own, in a pool apart from rank 0."""
    job = start(tmp_path / "run", "rollout.first_rank=1", death="1 rollout/generate SIGKILL")
    schedulers = set()
    while all(launcher.poll() is None for launcher in job.launchers) and not job.victim_is_down(1):
        job.look()
        time.sleep(0.1)
        schedulers |= {process for process in job.seen if is_scheduler(process)}
    code, console, record = job.end(limit_s=120)
    assert (code, record["rank"]) == (3, 1), console
    assert record["phase"].startswith("rollout/generate")
    assert schedulers  # and job.end found none of all processes left
    check_nothing_left(job, console)


def test_an_engine_that_loses_a_scheduler_in_the_middle_of_a_rollout_is_replaced(tmp_path: Path) -> None:
    """It is that of the rank that does not lead; with the engine's weights given back between rollouts."""
    settings = ("rollout.tp=2", "rollout.on_loss=replace", "rollout.sleep=all", "num_steps=3")
    job = start(tmp_path / "run", *settings, death="0 rollout/generate SIGKILL sglang::scheduler_TP1")
    while all(launcher.poll() is None for launcher in job.launchers):
        job.look()
        time.sleep(0.5)
    code, console, _ = job.end(limit_s=240)
    assert code == 0, console
    assert re.search(r"engine_0: scheduler tp 1 \(pid \d+\) was ended by SIGKILL .*; it is replaced", console), console
    steps = [json.loads(line) for line in (job.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["mismatch/max"] < 1e-4 for step in steps)
    assert [step["engines/lost"] for step in steps] == [1, 1, 1]
    assert all(step["engines/freed_bytes"] > 0 for step in steps)
    check_nothing_left(job, console)


def test_without_replacement_the_run_ends_and_names_the_process_that_was_lost(tmp_path: Path) -> None:
    job = start(tmp_path / "run", death="0 rollout/generate SIGSTOP sglang::scheduler")
    while all(launcher.poll() is None for launcher in job.launchers):
        job.look()
        time.sleep(0.5)
    code, console, record = job.end(limit_s=120)
    assert (code, record["code"]) == (3, 3), console
    assert re.search(r"engine_0: scheduler tp 0 \(pid \d+\) is stopped \(state T\)", console), console
    check_nothing_left(job, console)
