"""A rank of a PPO run is killed or stopped in each phase: the job is gone, the rank and its phase are named, and the
next start goes on from the last checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from rlhf.dist.heartbeat import read_beats
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
        ("SIGKILL", ("rollout/generate", "update/actor")),
        ("SIGKILL", ("score/critic", "reward")),
        ("SIGSTOP", ("rollout/sync", "update/critic")),
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


def wait_for_step(job: LaunchedJob, step: int) -> None:
    """Until the run has done so many steps."""
    while not (done := steps_of(job)) or done[-1] < step:
        assert all(launcher.poll() is None for launcher in job.launchers), job.console
        job.look()
        time.sleep(0.1)


def lines_of(job: LaunchedJob, name: str) -> list[dict]:
    """Of a file of the run folder; a line that is being written is left out."""
    path = job.run_folder / name
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps_of(job: LaunchedJob) -> list[int]:
    return [line["step"] for line in lines_of(job, "metrics.jsonl")]


def without_clocks(job: LaunchedJob) -> list[dict]:
    """Metrics as far as they do not depend on when they were measured, nor on which sync sent everything."""
    changing = ("time/", "rate/", "rollout/", "clock/", "sync/")
    return [{k: v for k, v in line.items() if not k.startswith(changing)} for line in lines_of(job, "metrics.jsonl")]


def test_a_run_that_was_killed_and_stopped_on_two_nodes_ends_as_one_that_never_was(tmp_path: Path) -> None:
    settings = ("num_steps=16", "checkpoint.every_steps=2", "checkpoint.asynchronous=false")
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    whole = start(tmp_path / "whole", *settings)
    job = start(tmp_path / "run", *settings, nodes=2)
    wait_for_step(job, 3)
    os.kill(next(beat.pid for beat in read_beats(job.run_folder) if beat.rank == 1), signal.SIGKILL)
    code, console, record = job.end()
    assert (code, record["rank"]) == (3, 1), console
    done = steps_of(job)[-1]

    job = start(tmp_path / "run", *settings, nodes=2)
    wait_for_step(job, done + 1)
    from_step = int(job.console.partition("resume: from step ")[2].partition(" of 16")[0])
    assert 0 <= done - from_step <= 2  # at most one interval is lost
    os.kill(job.launchers[1].pid, signal.SIGUSR1)
    code, console, record = job.end()
    assert (code, record["code"], record["reason"]) == (75, 75, "stopped on request"), console
    done = steps_of(job)[-1]
    assert done < 16
    assert json.loads((job.run_folder / "summary.json").read_text())["steps"] == done
    assert (job.run_folder / "checkpoints" / "latest").read_text().strip() == f"step_{done:08d}"
    assert all((job.run_folder / f"logs/rank_{rank}.log").stat().st_size > 100 for rank in range(2))

    job = start(tmp_path / "run", *settings)  # on one node
    code, console, _ = job.end(limit_s=120)
    assert code == 0, console
    assert f"resume: from step {done} of 16" in console
    assert whole.end(limit_s=120)[0] == 0
    assert without_clocks(job) == without_clocks(whole)
    assert lines_of(job, "samples.jsonl") == lines_of(whole, "samples.jsonl")
    assert not list((tmp_path / "run" / "runs").glob("death.*"))  # nothing was moved aside
