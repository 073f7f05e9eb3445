"""A rank of a PPO run is killed or stopped in each phase: the job is gone, the rank and its phase are named."""

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


def start(folder: Path, *, phase: str, signal: str) -> LaunchedJob:
    make_model_folder(folder / "model")
    config = ("configs/debug/ppo_tiny.yaml", "name=death", f"log.folder={folder}/runs")
    return LaunchedJob(
        folder,
        *("--module", "tests.scripts.ppo_death_worker"),
        *(*config, f"actor.model.path={folder}/model", *SETTINGS),
        nproc=2,
        env={"RLHF_TEST_DEATH": f"1 {phase} {signal}"},
    )


def check_end(job: LaunchedJob, *, phase: str, signal: str) -> None:
    """The job is gone within 60 s of the death, after a start of any length."""
    while job.launcher.poll() is None and not job.victim_is_down(1):
        job.look()
        time.sleep(0.2)
    code, console, record = job.end(limit_s=60)
    assert (code, record["rank"]) == (3, 1), console
    assert record["phase"].startswith(phase)
    assert "launch: rank 1 failed: rank 1 (host" in console
    assert ("died without a traceback" if signal == "SIGKILL" else "has not moved for") in console


@pytest.mark.parametrize(
    ("signal", "phases"),
    [
        ("SIGKILL", ("rollout/generate", "reward")),
        ("SIGKILL", ("score/critic", "update/actor")),
        ("SIGSTOP", ("rollout/sync", "reward")),
        ("SIGSTOP", ("score/reference", "update/critic")),
    ],
)
def test_a_death_in_any_phase_ends_the_job(tmp_path: Path, signal: str, phases: tuple[str, ...]) -> None:
    jobs = []
    for phase in phases:  # side by side: most of their time is start-up and waiting
        folder = tmp_path / phase.replace("/", "_")
        folder.mkdir()
        jobs.append(start(folder, phase=phase, signal=signal))
    for job, phase in zip(jobs, phases, strict=True):
        check_end(job, phase=phase, signal=signal)
