"""A SLURM cluster of two nodes on this machine, for as long as a test module runs: munged, slurmctld, two slurmd.

Everything lies in one folder, talks over the loopback interface and is started and ended here, by process id. The
programs are Debian's (slurm-wlm, munge), installed when they are missing and we may.
"""

import getpass
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psutil
import pytest

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PACKAGES = ("slurm-wlm", "munge")
PATH = f"{os.environ['PATH']}:/usr/sbin"

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
FirstJobId={first_job}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/builtin
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def need_slurm() -> None:
    """Make SLURM's programs available, or skip the test and say what is missing."""
    missing = _missing()
    if missing and os.getuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            subprocess.run(["apt-get", "-qq", *command], env=env, stdout=subprocess.DEVNULL, timeout=120)
        missing = _missing()
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (apt-get install {' '.join(PACKAGES)})")


def _missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def wait_until(holds: Callable[[], object], *, limit_s: float, told: Callable[[], object] = str) -> None:
    """Return as soon as the condition holds.

    Raises:
        AssertionError: It did not within the limit; with what `told` says then.
    """
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, told()
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class SlurmCluster:
    """`with SlurmCluster(folder) as cluster:` both nodes are idle; afterwards nothing of it is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        folder = self.folder
        for name in ("state", *(f"spool_{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        text = CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            ports=_free_ports(3),
            first_job=random.randrange(1, 9000),  # a job's port follows from its number, and clusters may run abreast
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))
        try:
            self._start_daemons()
        except BaseException:
            self.close()
            raise
        return self

    def _start_daemons(self) -> None:
        endings = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in endings.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge.socket").exists, limit_s=10, told=self.logs)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        wait_until(lambda: self.node_states() == ["idle"] * len(NODES), limit_s=30, told=self.logs)

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("a") as file:
            command = ("setpriv", "--pdeathsig", "KILL", *command)  # not to outlive a test process that is killed
            self._daemons.append(subprocess.Popen(command, env=self.env, stdout=file, stderr=subprocess.STDOUT))

    def logs(self) -> str:
        """What the daemons have said so far."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))

    def node_states(self) -> list[str]:
        """`idle`, `allocated`, ... of each node; empty while slurmctld does not answer yet."""
        command = ["sinfo", "--noheader", "--Node", "--format", "%T"]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=20).stdout.split()

    def run(self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What one of SLURM's commands prints, asked to print a result alone."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def cancel_all(self) -> None:
        """End every job and wait until both nodes are free."""
        self.run("scancel", "--user", getpass.getuser())
        wait_until(lambda: self.node_states() == ["idle"] * len(NODES), limit_s=40, told=self.logs)

    def close(self) -> None:
        """End the daemons, and whatever jobs have left."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        psutil.wait_procs([psutil.Process(daemon.pid) for daemon in self._daemons if daemon.poll() is None], timeout=10)
        left = processes_with(f"SLURM_CONF={self.env['SLURM_CONF']}")
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        for daemon in self._daemons:
            daemon.wait(timeout=10)

    def __exit__(self, *_: object) -> None:
        self.close()


def processes_with(*settings: str) -> list[psutil.Process]:
    """Processes of this machine that were started with all these settings (NAME=value) in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            if all(setting.encode() in environment for setting in settings):
                found.append(psutil.Process(int(folder.name)))
        except (OSError, psutil.NoSuchProcess):  # gone, or another user's
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


class BatchJob:
    """A job that a test submitted, its output in a file."""

    def __init__(self, cluster: SlurmCluster, *arguments: str | Path, cwd: Path, output: Path, **env: str) -> None:
        self._cluster, self._output = cluster, output
        self.id = cluster.run("sbatch", "--parsable", "--output", output, *arguments, cwd=cwd, env=env)

    @property
    def fields(self) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, ..."""
        words = self._cluster.run("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.fields["JobState"]

    @property
    def output(self) -> str:
        """What the batch script and its steps have printed so far."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def processes(self) -> list[psutil.Process]:
        """What runs on the nodes for this job."""
        return processes_with(f"SLURM_CONF={self._cluster.env['SLURM_CONF']}", f"SLURM_JOB_ID={self.id}")

    def wait(self, holds: Callable[[], object], *, limit_s: float = 180) -> None:
        """Return as soon as the condition holds; its output is shown when it does not."""
        wait_until(holds, limit_s=limit_s, told=lambda: f"{self.fields}\n{self.output}")

    def wait_for_end(self, limit_s: float = 180) -> tuple[str, str]:
        """State and exit code, once the nodes are idle again and no process of the job is left."""
        self.wait(lambda: self.state not in ("PENDING", "RUNNING", "COMPLETING"), limit_s=limit_s)
        self.wait(lambda: self._cluster.node_states() == ["idle"] * len(NODES), limit_s=30)
        assert not self.processes
        fields = self.fields
        return fields["JobState"], fields["ExitCode"].partition(":")[0]
