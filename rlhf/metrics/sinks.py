"""Where a step's numbers go: JSONL, TensorBoard, Weights & Biases. Used on rank 0 only; knows no other rank."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from rlhf.errors import ConfigError
from rlhf.metrics.jsontext import strict_json
from rlhf.metrics.tracker_record import TrackerRecord

SINK_FAILURES = (OSError, RuntimeError, ValueError, TypeError)


class MetricSink(Protocol):
    """Takes the flat numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's numbers."""

    def close(self) -> None:
        """Bring everything to where it belongs; nothing is written afterwards."""


class JsonlSink:
    """Lines `{"step": n, "<metric>": value, ...}`, on the disk after each step. A number that is not finite is null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(strict_json({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """TensorBoard scalars.

    Args:
        folder: Of the events.
        resume_step: Last step that counts of those which are there already; later ones are hidden by a mark, since
            event files cannot be cut. None for a run that begins.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard", "log.tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a metric."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the writer."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; one that is not `online` is kept in `folder`, for `wandb sync`.

    wandb's own step counts the calls, over all starts of a run: it may not go back, and a resume does some steps again.
    Ours is a metric beside the others and the axis of them all; a step that was done twice stands there twice.

    Args:
        folder: For wandb's own files.
        record: The run's id there and the calls so far.
        project: Project there.
        name: Name of the run there.
        config: Settings of the run, as plain values.
        online: Upload while the run goes on; needs a key in wandb's own settings.

    Raises:
        ConfigError: wandb is not installed, or cannot begin a run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        record: TrackerRecord,
        project: str,
        name: str,
        config: Mapping[str, object],
        online: bool,
    ) -> None:
        self._wandb, self._record = _module("wandb", "wandb", "log.wandb"), record
        try:
            self._run = self._wandb.init(
                id=record.id,
                resume="allow",
                project=project,
                name=name,
                dir=str(folder),
                config=dict(config),
                mode="online" if online else "offline",
                settings=self._wandb.Settings(silent=True, console="off"),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except self._wandb.Error as error:
            raise ConfigError(
                f"log.wandb: true, but no run can be begun ({error}); needs wandb to work; mend its settings, "
                f"or set log.wandb=false"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        try:
            self._run.log({**values, "step": step}, step=self._record.next_call(), commit=True)
        except self._wandb.Error as error:
            raise RuntimeError(f"wandb: {error}") from error

    def close(self) -> None:
        """Finish the run, uploading what is left when online."""
        try:
            self._run.finish()
        except self._wandb.Error as error:
            raise RuntimeError(f"wandb: {error}") from error


class SinkSet:
    """Several sinks as one. A sink that fails never ends the run: it is told once, and later writes are tried again.

    Args:
        sinks: In order of writing.
        on_failure: Takes one line about a sink's first failure, and one at close about a sink that lost steps.
    """

    def __init__(self, sinks: Sequence[MetricSink], *, on_failure: Callable[[str], None]) -> None:
        self._sinks = tuple(sinks)
        self._on_failure = on_failure
        self._lost = [0] * len(self._sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand one step's numbers to every sink."""
        for index, sink in enumerate(self._sinks):
            try:
                sink.write(step, values)
            except SINK_FAILURES as error:
                self._lost[index] += 1
                if self._lost[index] == 1:
                    self._on_failure(
                        f"{_name(sink)}: step {step} was not written ({type(error).__name__}: {error}); "
                        f"the run goes on, later steps are tried again"
                    )

    def close(self) -> None:
        """Close every sink, also after one of them failed."""
        for sink, lost in zip(self._sinks, self._lost, strict=True):
            if lost:
                self._on_failure(f"{_name(sink)}: {lost} steps were not written")
            try:
                sink.close()
            except SINK_FAILURES as error:
                self._on_failure(f"{_name(sink)}: not closed properly ({type(error).__name__}: {error})")


def _name(sink: MetricSink) -> str:
    return type(sink).__name__


def _module(module: str, package: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: true, but {package} cannot be imported ({error}); needs it; pip install {package}, "
            f"or set {setting}=false"
        ) from error
