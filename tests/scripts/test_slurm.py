"""The batch scripts on a real SLURM of two nodes: how a job is stopped, requeued, cancelled, and how it fails."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.dist.heartbeat import read_beats
from tests.harness.slurm_cluster import BatchJob, SlurmCluster, need_slurm
from tests.mcore.tiny import make_checkpoint
from tests.scripts.launched import CONFIG, REPO
from tools.quickstart import make_model_folder

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow]

SCRIPTS = REPO / "scripts" / "slurm"
EVERY_ROLE_OVER_BOTH_NODES = (
    *("actor.model.init=random", "critic.model.init=random", "reference.model.init=random"),
    *("actor.parallel.tp=2", "critic.parallel.pp=2", "reference.parallel.dp=2", "rollout.tp=2"),
)
SOON = "StartTime=now+5"
"""SLURM waits for two minutes; in the second of the requeue it takes the new start's credential for the old one's."""
WORKER_SCRIPT = """#!/usr/bin/env bash
source "$RLHF_ROOT/scripts/slurm/batch_job.sh"
launch_on_all_nodes tests.dist.death_worker "$@"
"""
"""As train.sbatch, with ranks that import torch alone."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    need_slurm()
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(cluster: SlurmCluster) -> Iterator[None]:
    """A test that failed leaves the nodes to the next one."""
    yield
    cluster.cancel_all()


def submit(cluster: SlurmCluster, folder: Path, *arguments: str | Path, **env: str) -> BatchJob:
    """Submit from the project's folder, as people do."""
    settings = {"RLHF_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    return BatchJob(cluster, *arguments, cwd=REPO, output=folder / "job.txt", **settings)


def submit_worker(
    cluster: SlurmCluster,
    folder: Path,
    mode: str,
    *overrides: str,
    sbatch: Sequence[str] = (),
    launch: Sequence[str] = (),
    **env: str,
) -> BatchJob:
    """Submit a job whose ranks run one function of tests/dist/death_worker.py, with the directives of train.sbatch."""
    directives = [line for line in (SCRIPTS / "train.sbatch").read_text().splitlines() if line.startswith("#SBATCH")]
    (folder / "worker.sbatch").write_text(WORKER_SCRIPT.replace("\n", "\n" + "\n".join(directives) + "\n", 1))
    (folder / "death.yaml").write_text(CONFIG.format(nproc=2, folder=folder))
    settings = {"RLHF_TEST_MODE": mode, "RLHF_ROOT": str(REPO), **env}
    arguments = ("--nodes=2", *sbatch, folder / "worker.sbatch", *launch, folder / "death.yaml", *overrides)
    return submit(cluster, folder, *arguments, **settings)


def working_ranks(run_folder: Path) -> dict[int, int]:
    """Process ids of the death workers that are at their steps, by rank."""
    return {beat.rank: beat.pid for beat in read_beats(run_folder) if beat.phase in ("rollout", "update")}


def read_exit(run_folder: Path) -> dict:
    return json.loads((run_folder / "exit.json").read_text())


def num_steps(run_folder: Path) -> int:
    metrics = run_folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.timeout(600)  # two starts of a real run
def test_ppo_on_two_nodes_stops_on_usr1_comes_back_and_goes_on_to_its_end(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    make_model_folder(tmp_path / "model")
    config = ("configs/debug/ppo_tiny.yaml", f"log.folder={tmp_path}/runs", f"actor.model.path={tmp_path}/model")
    settings = (*EVERY_ROLE_OVER_BOTH_NODES, "data.held_out=0", "job.torch_threads=1", "num_steps=6")
    job = submit(cluster, tmp_path, "--nodes=2", "--time=30", SCRIPTS / "train.sbatch", *config, *settings)
    run_folder = tmp_path / "runs" / "ppo_tiny"
    job.wait(lambda: num_steps(run_folder))
    cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait(lambda: job.fields["Restarts"] == "1", limit_s=60)
    stopped = read_exit(run_folder)
    assert (stopped["code"], stopped["reason"], stopped["rank"]) == (75, "stopped on request", None)
    stopped_after = num_steps(run_folder)
    assert 0 < stopped_after < 6
    assert json.loads((run_folder / "summary.json").read_text())["steps"] == stopped_after
    assert (run_folder / "checkpoints" / "latest").read_text().strip() == f"step_{stopped_after:08d}"
    assert (run_folder / "stop").exists()  # and must not stop the next start

    job.wait(lambda: job.state == "PENDING")
    cluster.run("scontrol", "update", f"JobId={job.id}", SOON)
    assert job.wait_for_end() == ("COMPLETED", "0")
    assert read_exit(run_folder)["code"] == 0
    steps = [json.loads(line)["step"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 7))
    assert f"resume: from step {stopped_after} of 6" in job.output
    assert not run_folder.with_name("ppo_tiny.1").exists()
    for rank in (0, 1):
        assert f"rank {rank} of 2" in (run_folder / "logs" / f"rank_{rank}.log").read_text()
    for start in (1, 2):
        assert f"job {job.id}, start {start}, on n[1-2]; run folder {run_folder}" in job.output


def test_the_time_limit_warns_and_a_cancelled_job_leaves_nothing(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit_worker(cluster, tmp_path, "work_with_children", sbatch=["--time=1", "--signal=B:USR1@59"])
    job.wait(lambda: job.fields["Restarts"] == "1")  # warned before the ranks were there; not forgotten
    run_folder = tmp_path / "runs" / "death"
    assert read_exit(run_folder)["code"] == 75

    job.wait(lambda: job.state == "PENDING")
    first = {beat.pid for beat in read_beats(run_folder)}
    cluster.run("scontrol", "update", f"JobId={job.id}", SOON, "TimeLimit=30")
    job.wait(lambda: working_ranks(run_folder).keys() == {0, 1} and not first & set(working_ranks(run_folder).values()))
    assert len(job.processes) > 2 * 4  # srun, launch.sh, torchrun, a rank, its child
    cluster.run("scancel", job.id)
    assert job.wait_for_end()[0] == "CANCELLED"
    record = read_exit(run_folder)
    assert record["code"] == 3
    assert record["reason"].startswith("ended by SIGTERM to the launcher")


def test_a_killed_rank_fails_the_job_and_clears_both_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    apptainer = tmp_path / "bin" / "apptainer"  # no container: what it is asked to run
    apptainer.write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\nwhile [[ $1 != a.sif ]]; do shift; done; "${{@:2}}"\n'
    )
    apptainer.chmod(0o755)
    inside = {
        "CONTAINER_IMAGE": "a.sif",
        "CONTAINER_MOUNTS": "/data:/data",
        "PATH": f"{apptainer.parent}:{cluster.env['PATH']}",
    }
    job = submit_worker(cluster, tmp_path, "work_with_children", **inside)
    run_folder = tmp_path / "runs" / "death"
    job.wait(lambda: working_ranks(run_folder).keys() == {0, 1})
    os.kill(working_ranks(run_folder)[1], signal.SIGKILL)
    assert job.wait_for_end() == ("FAILED", "3")
    record = read_exit(run_folder)
    assert (record["code"], record["rank"]) == (3, 1)
    assert "launch: rank 1 failed: rank 1 (host" in job.output
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3  # the check, and a launcher on each node
    assert all(f"exec --nv --bind {REPO}:{REPO},/data:/data --pwd {REPO} a.sif" in call for call in calls)


def test_a_node_whose_launcher_never_starts_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    stuck = '[[ $SLURMD_NODENAME == n2 && "$*" == *rlhf.dist.launcher* ]] && exec sleep 300'
    python.write_text(f'#!/bin/bash\n{stuck}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = submit_worker(cluster, tmp_path, "finish", launch=["--start-timeout", "8"], RLHF_PYTHON=str(python))
    assert job.wait_for_end() == ("FAILED", "3")
    assert "no sign of node 1 of 2 within 8 s" in job.output
    assert "slurm: node 1 is n2" in job.output
    assert read_exit(tmp_path / "runs" / "death")["code"] == 3


def test_the_doctor_looks_at_every_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--nodes=2", SCRIPTS / "train.sbatch", "--doctor", "--nproc", "1", tmp_path)
    _, code = job.wait_for_end()
    assert read_exit(tmp_path / "doctor")["code"] == int(code)
    assert "doctor: 2 rank(s)" in job.output


def test_what_is_wrong_beforehand_starts_nothing_and_gives_2(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit_worker(cluster, tmp_path, "finish", "job.progres_limit_s=3")
    assert job.wait_for_end() == ("FAILED", "2")
    assert "job.progres_limit_s" in job.output
    assert not (tmp_path / "runs").exists()


def test_a_second_job_of_one_name_leaves_the_first_one_its_record(cluster: SlurmCluster, tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "death" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "exit.json").write_text("{}")
    with (logs / ".launch_0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the first node's launcher does
        job = submit_worker(cluster, tmp_path, "finish")
        assert job.wait_for_end() == ("FAILED", "2")
    assert "another job is at work in it" in job.output
    assert (logs.parent / "exit.json").exists()
    assert not (logs.parent / "stop").exists()


@pytest.mark.parametrize(
    ("script", "root", "reason"),
    [
        ("generate", REPO, "tools/generate.py: not in this checkout"),
        ("train", "/nowhere", "/nowhere: not the project's folder"),
    ],
)
def test_a_script_says_what_is_missing(
    cluster: SlurmCluster, tmp_path: Path, script: str, root: str | Path, reason: str
) -> None:
    job = submit(cluster, tmp_path, SCRIPTS / f"{script}.sbatch", "some.yaml", RLHF_ROOT=str(root))
    assert job.wait_for_end() == ("FAILED", "2")
    assert reason in job.output


def test_conversion_runs_as_ranks_on_every_node_or_as_one_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    source, there, back = (tmp_path / name for name in ("model", "there", "back"))
    make_checkpoint("llama", source)
    for ranks, nodes, command in (
        (2, 2, ("to-megatron", source, there, "--tp", "2", "--pp", "2")),
        (1, 1, ("to-hf", there, back)),
    ):
        arguments = (f"--nodes={nodes}", SCRIPTS / "convert.sbatch", *command)
        (folder := tmp_path / command[0]).mkdir()
        job = submit(cluster, folder, *arguments, RLHF_ROOT=str(REPO), CONVERT_RANKS=str(ranks))
        assert job.wait_for_end() == ("COMPLETED", "0")
        assert f"-> {command[2]}" in job.output
        assert (" of 4 processes" in job.output) == (ranks == 2)
    found, expected = (load_file(folder / "model.safetensors") for folder in (back, source))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    job = submit(cluster, tmp_path, SCRIPTS / "convert.sbatch", "to-hf", there, back, RLHF_ROOT=str(REPO))
    assert job.wait_for_end() == ("FAILED", "2")
    assert f"{back}: exists" in job.output


def test_srun_opens_the_container_where_it_can(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\necho '  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'\n")
    srun.chmod(0o755)
    show = 'source "$RLHF_ROOT/scripts/slurm/batch_job.sh"; printf "%s\n" "${step[@]}" "inside:${#in_container[@]}"'
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RLHF_ROOT": str(REPO), "CONTAINER_IMAGE": "nvcr.io#x:1"}
    shown = subprocess.run(["bash", "-euc", show], env=env, cwd=tmp_path, check=True, capture_output=True, text=True)
    said = shown.stdout.splitlines()
    mounts = f"--container-mounts={REPO}:{REPO},{tmp_path}:{tmp_path}"
    assert {"--container-image=nvcr.io#x:1", mounts, f"--container-workdir={tmp_path}", "inside:0"} <= set(said)
