"""A rank of a PPO run is killed or stopped in each phase: the job is gone, the rank and its phase are named."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.scripts.launched import LaunchedJob
from tools.quickstart import make_model_folder

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SETTINGS = (
    *("actor.model.init=random", "critic.model.init=random", "reference.model.init=random"),
    *("actor.parallel.tp=2", "critic.parallel.pp=2", "reference.parallel.dp=2", "rollout.tp=2"),
    *("data.held_out=0", "job.torch_threads=1", "job.alive_limit_s=6", "job.progress_limit_s=30"),
)


def start(
    folder: Path,
    *settings: str,
    death: str = "9 nowhere SIGKILL",
    nodes: int = 1,
    module: str = "tests.scripts.ppo_death_worker",
) -> LaunchedJob:
    """PPO on two ranks; `death` is rank, phase and signal."""
    make_model_folder(folder / "model")
    config = ("configs/debug/ppo_tiny.yaml", "name=death", f"log.folder={folder}/runs")
    return LaunchedJob(
        folder,
        *("--module", module),
        *(*config, f"actor.model.path={folder}/model", *SETTINGS, *settings),
        nproc=2,
        env={"RLHF_TEST_DEATH": death},
        nodes=nodes,
    )


def check_end(job: LaunchedJob, *, phase: str, number: str) -> None:
    """The job is gone within 60 s of the death, after a start of any length."""
    while all(launcher.poll() is None for launcher in job.launchers) and not job.victim_is_down(1):
        job.look()
        time.sleep(0.2)
    code, console, record = job.end(limit_s=60)
    assert (code, record["rank"]) == (3, 1), console
    assert record["phase"].startswith(phase)
    assert "launch: rank 1 failed: rank 1 (host" in console
    assert ("died without a traceback" if number == "SIGKILL" else "has not moved for") in console


@pytest.mark.parametrize(
    ("number", "phases"),
    [
        ("SIGKILL", ("rollout/generate", "reward")),
        ("SIGKILL", ("score/critic", "update/actor")),
        ("SIGSTOP", ("rollout/sync", "reward")),
        ("SIGSTOP", ("score/reference", "update/critic")),
    ],
)
def test_a_death_in_any_phase_ends_the_job_on_one_node_and_on_two(
    tmp_path: Path, number: str, phases: tuple[str, ...]
) -> None:
    jobs = []
    for nodes, phase in enumerate(phases, start=1):  # side by side: most of their time is start-up and waiting
        folder = tmp_path / phase.replace("/", "_")
        folder.mkdir()
        jobs.append(start(folder, death=f"1 {phase} {number}", nodes=nodes))
    for job, phase in zip(jobs, phases, strict=True):
        check_end(job, phase=phase, number=number)


def test_a_rank_killed_between_two_buckets_of_a_sync_ends_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    small = ("rollout.tp=1", "sync.bucket_bytes=4096")
    job = start(folder, *small, death="1", module="tests.scripts.sync_death_worker")
    check_end(job, phase="rollout/sync", number="SIGKILL")
    assert "dies between two buckets" in (job.run_folder / "logs" / "rank_1.log").read_text()


def test_a_run_on_two_nodes_stops_at_a_step_when_the_other_node_is_asked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = start(tmp_path / "run", "num_steps=1000", nodes=2)
    metrics = job.run_folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert all(launcher.poll() is None for launcher in job.launchers), job.console
        job.look()
        time.sleep(0.2)
    os.kill(job.launchers[1].pid, signal.SIGUSR1)
    code, console, record = job.end()
    assert (code, record["code"], record["reason"]) == (75, 75, "stopped on request"), console
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps[-1] < 1000
    assert json.loads((job.run_folder / "summary.json").read_text())["steps"] == steps[-1]
    assert all((job.run_folder / f"logs/rank_{rank}.log").stat().st_size > 100 for rank in range(2))
