"""A job started through scripts/launch.sh by a test, and what is left of it afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from rlhf.dist.aftermath import is_there
from rlhf.dist.heartbeat import process_state, read_beats

REPO = Path(__file__).resolve().parents[2]
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CONFIG = """
name: death
trainer: sft
actor:
  model: {{path: nowhere}}
  parallel: {{dp: {nproc}}}
data: {{source: jsonl, path: nowhere.jsonl}}
job: {{device: cpu, torch_threads: 1, alive_limit_s: 8, progress_limit_s: 10}}
log: {{folder: {folder}/runs}}
"""


class LaunchedJob:
    """A job behind scripts/launch.sh, one launcher a node, all nodes on this machine; each console in a file."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        nproc: int,
        env: dict[str, str],
        nodes: int = 1,
        come: Sequence[int] = (),
        rendezvous: str = "",
        apart: bool = False,
    ) -> None:
        """Start it.

        Args:
            folder: Of the test.
            arguments: Of launch.sh.
            nproc: Ranks of the job.
            env: More environment.
            nodes: Launchers.
            come: The nodes whose launchers are started; all when left out.
            rendezvous: Of node 0; a free port here when left out.
            apart: Node 1 has process ids of its own, as if it were another host.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.run_folder = folder / "runs" / "death"
        self.nproc, self.nodes = nproc, nodes
        self.outputs = [folder / f"console_{node}.txt" for node in range(nodes)]
        self._command, self._apart = ["scripts/launch.sh", *arguments], apart
        self._rendezvous = rendezvous or f"127.0.0.1:{free_port()}"
        self._env = {**os.environ, "RLHF_PYTHON": sys.executable, **env}
        late_first = sorted(come or range(nodes), reverse=True)  # node 0, which the others wait for, comes last
        self.launchers = [self.start_node(node, self.outputs[node]) for node in late_first][::-1]
        self.seen: set[psutil.Process] = set()

    def start_node(self, node: int, output: Path, *more: str) -> subprocess.Popen:
        """Start the launcher of a node, with more arguments at the end."""
        where = ["--nnodes", str(self.nodes), "--node-rank", str(node), "--rendezvous", self._rendezvous]
        with output.open("w") as console:
            return subprocess.Popen(
                [
                    *(APART if self._apart and node == 1 else ()),
                    self._command[0],
                    *(where if self.nodes > 1 else []),
                    *self._command[1:],
                    *more,
                ],
                cwd=REPO,
                env=self._env,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @classmethod
    def of_mode(
        cls,
        folder: Path,
        mode: str,
        *overrides: str,
        nproc: int = 2,
        nodes: int = 1,
        come: Sequence[int] = (),
        rendezvous: str = "",
        apart: bool = False,
    ) -> Self:
        """Ranks that run one function of tests/dist/death_worker.py; overrides with -- are the launcher's."""
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "death.yaml"
        config.write_text(CONFIG.format(nproc=nproc, folder=folder))
        options = [text for text in overrides if text.startswith("--")]
        settings = [text for text in overrides if not text.startswith("--")]
        arguments = [*(word for text in options for word in text.split("=")), "--module", "tests.dist.death_worker"]
        return cls(
            folder,
            *(*arguments, str(config), *settings),
            nproc=nproc,
            env={"RLHF_TEST_MODE": mode},
            nodes=nodes,
            come=come,
            rendezvous=rendezvous,
            apart=apart,
        )

    @property
    def launcher(self) -> subprocess.Popen:
        """Of node 0."""
        return self.launchers[0]

    @property
    def console(self) -> str:
        """What all nodes have shown so far, node by node."""
        return "".join(output.read_text() for output in self.outputs if output.exists())

    def look(self) -> None:
        """Remember every process that the job has now."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                self.seen |= set(psutil.Process(launcher.pid).children(recursive=True))

    def wait_for_phase(self, *phases: str, limit_s: float = 90) -> None:
        """Until every rank beats in one of the phases."""
        until = time.monotonic() + limit_s
        while True:
            beats = read_beats(self.run_folder)
            if len(beats) == self.nproc and all(beat.phase in phases for beat in beats):
                self.look()
                return
            assert all(launcher.poll() is None for launcher in self.launchers), self.console
            assert time.monotonic() < until, f"{beats}\n{self.console}"
            time.sleep(0.1)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank's process alone."""
        node, local_rank = divmod(rank, self.nproc // self.nodes)
        wanted = {"RLHF_NODE_RANK": str(node), "LOCAL_RANK": str(local_rank)}
        ranks = [p for p in self.seen if is_there(p) and p.cmdline()[1:3] == ["-u", "-m"]]
        next(p for p in ranks if wanted.items() <= p.environ().items()).send_signal(number)

    def victim_is_down(self, rank: int) -> bool:
        """The rank has begun and is dead or stopped by now."""
        return any(beat.rank == rank and process_state(beat) != "running" for beat in read_beats(self.run_folder))

    def torchrun(self, node: int = 0) -> psutil.Process:
        """A launcher's torchrun."""
        return psutil.Process(self.launchers[node].pid).children()[0]

    def end(self, limit_s: float = 60, *, without: int | None = None) -> tuple[int, str, dict]:
        """The code that every launcher returns, the consoles and exit.json, once all that belonged to the job is gone.

        `without` is a node whose launcher was killed and can return nothing.
        """
        until = time.monotonic() + limit_s
        codes = {launcher.wait(timeout=max(1.0, until - time.monotonic())) for launcher in self._alive_but(without)}
        assert len(codes) == 1, f"{codes}\n{self.console}"
        while (left := [process for process in self.seen if is_there(process)]) and time.monotonic() < until:
            assert without is not None, f"left over: {left}"  # else the launcher waits for them
            time.sleep(0.1)
        assert not left, f"left over: {left}"
        pids = {process.pid for process in self.seen}
        segments = [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
        assert not segments, f"left over: {segments}"
        return codes.pop(), self.console, json.loads((self.run_folder / "exit.json").read_text())

    def _alive_but(self, without: int | None) -> list[subprocess.Popen]:
        return [launcher for node, launcher in enumerate(self.launchers) if node != without]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_one_and_two_nodes(folder: Path, mode: str, *overrides: str, nproc: int = 2) -> list[LaunchedJob]:
    """The same job twice, side by side: most of its time is start-up and waiting."""
    return [LaunchedJob.of_mode(folder / f"on_{nodes}", mode, *overrides, nproc=nproc, nodes=nodes) for nodes in (1, 2)]
