"""A job started through scripts/launch.sh by a test, and what is left of it afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import psutil

from rlhf.dist.heartbeat import process_state, read_beats

REPO = Path(__file__).resolve().parents[2]
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
    """A job behind scripts/launch.sh, its console in a file."""

    def __init__(self, folder: Path, *arguments: str, nproc: int, env: dict[str, str]) -> None:
        self.run_folder = folder / "runs" / "death"
        self.nproc = nproc
        self.output = folder / "console.txt"
        with self.output.open("w") as console:
            self.launcher = subprocess.Popen(
                ["scripts/launch.sh", *arguments],
                cwd=REPO,
                env={**os.environ, "RLHF_PYTHON": sys.executable, **env},
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.seen: set[psutil.Process] = set()

    @classmethod
    def of_mode(cls, folder: Path, mode: str, *overrides: str, nproc: int = 4) -> Self:
        """Ranks that run one function of tests/dist/death_worker.py."""
        config = folder / "death.yaml"
        config.write_text(CONFIG.format(nproc=nproc, folder=folder))
        arguments = ["--module", "tests.dist.death_worker", str(config), *overrides]
        return cls(folder, *arguments, nproc=nproc, env={"RLHF_TEST_MODE": mode})

    def look(self) -> None:
        """Remember every process that the job has now."""
        self.seen |= set(psutil.Process(self.launcher.pid).children(recursive=True))

    def wait_for_phase(self, *phases: str, limit_s: float = 90) -> None:
        """Until every rank beats in one of the phases."""
        until = time.monotonic() + limit_s
        while True:
            beats = read_beats(self.run_folder)
            if len(beats) == self.nproc and all(beat.phase in phases for beat in beats):
                self.look()
                return
            assert self.launcher.poll() is None, self.output.read_text()
            assert time.monotonic() < until, f"{beats}\n{self.output.read_text()}"
            time.sleep(0.1)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank's process alone."""
        os.kill(next(beat.pid for beat in read_beats(self.run_folder) if beat.rank == rank), number)

    def victim_is_down(self, rank: int) -> bool:
        """The rank has begun and is dead or stopped by now."""
        return any(beat.rank == rank and process_state(beat) != "running" for beat in read_beats(self.run_folder))

    def torchrun(self) -> psutil.Process:
        """The launcher's torchrun."""
        return next(p for p in psutil.Process(self.launcher.pid).children() if "torch.distributed.run" in p.cmdline())

    def end(self, limit_s: float = 60) -> tuple[int, str, dict]:
        """The launcher's code, the console and exit.json, once the job is gone with everything that belonged to it."""
        code = self.launcher.wait(timeout=limit_s)
        left = [process for process in self.seen if process.is_running() and process.status() != "zombie"]
        assert not left, f"left over: {left}"
        pids = {process.pid for process in self.seen}
        segments = [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]
        assert not segments, f"left over: {segments}"
        return code, self.output.read_text(), json.loads((self.run_folder / "exit.json").read_text())
