"""The folder of one run: what lies where in it, and writing it so that every file is whole or absent.

Rank 0 creates and writes it; the other ranks only write their own log. Other tools rely on the names here.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.metrics.cut import lines_up_to, one_line_a_step
from rlhf.metrics.jsontext import strict_json
from rlhf.metrics.whole_file import write_whole

JOB_FILES = {"logs", "heartbeat", "nodes", "exit.json", "stop"}  # of the job that is running now; it tends them itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run came to. NaN stands for what was not measured (null in the file)."""

    steps: int
    """Steps done."""
    seconds: float
    """Wall-clock seconds of these steps, over all starts of the run."""
    held_out_before: float
    """Share of held-out problems solved before the first step."""
    held_out_after: float
    """Share of held-out problems solved after the last step."""
    reward_first: float
    """Mean reward of the first step."""
    reward_last: float
    """Mean reward of the last step."""
    more: Mapping[str, float | int | str] = field(default_factory=dict)
    """Further figures, written beside the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """One response, for people to read."""

    step: int
    """Step that sampled it; 0 is before the first."""
    split: str
    """train or held_out."""
    sample_id: int
    """Id of the sample in the run."""
    prompt: str
    """Prompt as the model saw it."""
    response: str
    """Response without special tokens."""
    answer: str
    """Reference answer; empty where there is none."""
    reward: float
    """Total reward; NaN (null in the file) where scoring failed."""
    error: str
    """Why scoring failed; empty where it did not."""
    reward_parts: Mapping[str, float]
    """What the reward is made of."""
    prompt_tokens: int
    """Length of the prompt."""
    response_tokens: int
    """Length of the response."""
    finish_reason: str
    """Why it ended: stop, length, ..."""
    policy_version: int
    """Version of the weights that sampled it."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and records of one run."""

    path: Path

    @classmethod
    def open(cls, path: Path, config_yaml: str, *, resume_step: int | None) -> "RunFolder":
        """The folder of a run that begins (None), or that goes on after a step. Rank 0 calls it, inside the job.

        A folder that goes on keeps what it holds of steps up to that one and forgets the rest, which will be done
        again: each file is cut whole, so that after a crash in between the next resume does the same. A part that is
        missing is no fault.

        Raises:
            ConfigError: As `create`.
        """
        if resume_step is None:
            return cls.create(path, config_yaml)
        folder = cls(path)
        with _usable(path):
            folder._check_ended()
            folder._begin(config_yaml)
            folder.summary.unlink(missing_ok=True)  # it says that the run has come to its end
            if folder.metrics.exists():
                write_whole(folder.metrics, one_line_a_step(folder.metrics, resume_step))
            if folder.samples.exists():
                write_whole(folder.samples, lines_up_to(folder.samples, resume_step))
            for found in folder._files_after(resume_step):
                found.unlink()
        return folder

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> "RunFolder":
        """A folder for a new run, holding `config.yaml`. Rank 0 calls it, inside the job.

        What an earlier run of the same name left is moved to NAME.1, NAME.2, ..., but for the files that the job
        itself keeps there: logs, marks and locks.

        Raises:
            ConfigError: Another process of this machine is running in that folder, or the folder cannot be made.
        """
        folder = cls(path)
        with _usable(path):
            if folder.config.exists():
                folder._check_ended()
                folder._move_aside()
            folder._begin(config_yaml)
        return folder

    @property
    def config(self) -> Path:
        """Resolved settings."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One line a sample."""
        return self.path / "samples.jsonl"

    @property
    def summary(self) -> Path:
        """What the run came to."""
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        """Curves as a picture."""
        return self.path / "curves.png"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def tracker(self) -> Path:
        """The run's id at a tracker."""
        return self.path / "tracker.json"

    @property
    def exit(self) -> Path:
        """Exit code and its reason; the job writes it last."""
        return self.path / "exit.json"

    @property
    def stop(self) -> Path:
        """Request to stop: the run saves and ends when this file appears."""
        return self.path / "stop"

    @property
    def logs(self) -> Path:
        """Logs of the ranks."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.path / "checkpoints"

    def rank_log(self, rank: int) -> Path:
        """Log of one rank."""
        return self.logs / f"rank_{rank}.log"

    def sample_dump(self, step: int) -> Path:
        """All rows of a step that log.samples_every_steps picks."""
        return self.path / "samples" / f"step_{step:06d}.parquet"

    def timeline(self, step: int, ending: str) -> Path:
        """Timeline of a step that profile.steps names: `json` (Chrome trace) or `png`."""
        return self.path / "timeline" / f"step_{step:06d}.{ending}"

    def mismatch(self, step: int, ending: str) -> Path:
        """What was found when engines and trainer differed at a step: `json`, or `txt` for people."""
        return self.path / "mismatch" / f"step_{step:06d}.{ending}"

    def write_mismatch(self, step: int, found: Mapping[str, object], text: str) -> None:
        """Write both, each whole or not at all."""
        self.mismatch(step, "json").parent.mkdir(exist_ok=True)
        write_whole(self.mismatch(step, "json"), strict_json(dict(found), indent=2) + "\n")
        write_whole(self.mismatch(step, "txt"), text + "\n")

    def torch_trace(self, step: int, rank: int) -> Path:
        """What torch.profiler saw of such a step on one rank."""
        return self.path / "timeline" / f"step_{step:06d}_rank_{rank}.json"

    def write_timeline(self, step: int, trace: Mapping[str, object]) -> None:
        """Write the Chrome trace of a step, whole or not at all."""
        path = self.timeline(step, "json")
        path.parent.mkdir(exist_ok=True)
        write_whole(path, strict_json(dict(trace)) + "\n")

    def add_samples(self, records: list[SampleRecord]) -> None:
        """Append samples, one line each: all of them or none."""
        size = self.samples.stat().st_size if self.samples.exists() else 0
        try:
            with self.samples.open("a", encoding="utf-8") as file:
                file.writelines(strict_json(asdict(record)) + "\n" for record in records)
        except OSError:
            if self.samples.exists():
                os.truncate(self.samples, size)  # a line that was cut short would take the next one with it
            raise

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`, whole or not at all."""
        flat = asdict(summary)
        self._write("summary.json", strict_json({**flat.pop("more"), **flat}, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text)

    def _begin(self, config_yaml: str) -> None:
        """This process writes here from now on."""
        for below in (self.path, self.logs, self.checkpoints):
            below.mkdir(parents=True, exist_ok=True)
        self._write("started.json", json.dumps(_this_process()) + "\n")
        self._write("config.yaml", config_yaml)

    def _files_after(self, step: int) -> list[Path]:
        """Sample dumps, timelines and mismatches of later steps, and what a crash left of an earlier cut."""
        found = [path for name in ("samples", "timeline", "mismatch") for path in (self.path / name).glob("step_*")]
        parts = list(self.path.glob(".*.jsonl.[0-9]*"))
        return parts + [path for path in found if int(re.split(r"[_.]", path.name)[1]) > step]

    def _check_ended(self) -> None:
        started = self.path / "started.json"
        if not started.exists():
            return
        mark = json.loads(started.read_text(encoding="utf-8"))
        if mark["host"] == socket.gethostname() and _alive(mark):
            raise ConfigError(
                f"name: a run is going on in {self.path} (process {mark['pid']}); needs another name; set name=NAME, "
                f"or stop that run with: touch {self.stop}"
            )

    def _move_aside(self) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        aside.mkdir()
        for found in sorted(self.path.iterdir()):
            if found.name not in JOB_FILES and not found.name.startswith("."):
                found.rename(aside / found.name)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"log.folder: {path} cannot be used ({error}); needs a place to write; set log.folder=FOLDER"
        ) from error


def _this_process() -> dict[str, str | int]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _started(os.getpid()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _started(pid: int) -> str:
    """When a process of this machine was started, in clock ticks, so that a number used again is told apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _alive(mark: Mapping[str, str | int]) -> bool:
    """Whether another process of this machine, the one of the mark, is still there."""
    started = _started(int(mark["pid"]))
    return mark["pid"] != os.getpid() and started != "" and started == mark["pid_started"]
