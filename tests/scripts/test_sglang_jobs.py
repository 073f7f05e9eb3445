"""PPO with rollouts from SGLang, through the launcher: a run to its end, and one whose engine's leader is killed."""

import json
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
    folder.mkdir()
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


def test_ppo_learns_from_rollouts_whose_logprobs_are_the_trainers(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "rollout.tp=2", death="9 nowhere SIGKILL")
    while all(launcher.poll() is None for launcher in job.launchers):
        job.look()
        time.sleep(0.5)
    code, console, _ = job.end(limit_s=240)
    assert code == 0, console
    steps = [json.loads(line) for line in (job.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch/max"] < 1e-4 for step in steps)  # fp32; one wrong weight costs far more
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
