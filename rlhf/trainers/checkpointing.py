"""Saving a run so that it can go on, and taking up what was saved. Every rank of the job makes the same calls."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch.distributed import ProcessGroup

from rlhf.checkpoint.load import check_state, load
from rlhf.checkpoint.manifest import read_manifest
from rlhf.checkpoint.saver import Content, Saver
from rlhf.config.load import to_yaml
from rlhf.config.run import RunConfig
from rlhf.dist.agree import first_does, gather
from rlhf.dist.progress_clock import ProgressClock
from rlhf.errors import CheckpointError, SaveError
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.model_state import model_blocks, optimizer_blocks, weights_loaded
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.random_state import rng_state, set_rng_state
from rlhf.mcore.state_record import model_record, restore_record
from rlhf.mcore.stored import extra_state_keys
from rlhf.metrics.timers import Timers
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import checksums, wrapped
from rlhf.trainers.resume_point import ResumePoint
from rlhf.trainers.run_changes import check_frozen, same_ranks
from rlhf.trainers.run_record import DRIVER_FILE, RunRecord


@dataclass(frozen=True, slots=True)
class TrainedRole:
    """A model whose weights and optimizer state are saved."""

    name: str
    model: MegatronModel | None
    """None on ranks outside its pool, like the optimizer."""
    optimizer: Optimizer | None

    def blocks(self, *, own_share: bool) -> list[Block]:
        """As `model_blocks` and `optimizer_blocks`; none outside the pool."""
        if self.model is None or self.optimizer is None:
            return []
        return [
            *model_blocks(self.model, prefix=self.name, own_share=own_share),
            *optimizer_blocks(self.model, self.optimizer, prefix=self.name, own_share=own_share),
        ]


class LoopState(Protocol):
    """What a loop must remember from step to step, equal on all ranks."""

    @property
    def step(self) -> int:
        """Steps done."""

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON."""


class Checkpoints:
    """Saves when it is due: a context manager around the run, whose end waits for the disk.

    Collective over the job, like all its methods.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        group: ProcessGroup,
        record: RunRecord,
        roles: Sequence[TrainedRole],
        frozen: Mapping[str, MegatronModel | None],
        saver: Saver,
        export: Callable[[Path], None],
        run_folder: Path,
        timers: Timers,
        progress: ProgressClock,
        note: Callable[[str], None],
    ) -> None:
        """Nothing is saved or loaded yet.

        Args:
            config: The run.
            rank: In the job.
            group: gloo, over all ranks of the job.
            record: The run before its first step.
            roles: Trained models, the same ones in the same order on each rank.
            frozen: This rank's part of models that are not trained, by role: no checkpoint holds them, and a resume
                asks whether they are the same.
            saver: Of the run's checkpoints.
            export: Writes the actor as a Hugging Face checkpoint. Collective over its pool.
            run_folder: Where exports go, into `hf/`.
            timers: Time of saving is that of the phase `save`.
            progress: Of this rank, which is not blamed while it waits for the disks of others.
            note: A message on rank 0's console.
        """
        self._config, self._rank, self._group, self._record = config, rank, group, record
        self._roles, self._frozen, self._saver, self._export = tuple(roles), dict(frozen), saver, export
        self._exports, self._timers, self._progress, self._note = run_folder / "hf", timers, progress, note
        self._saved_step: int | None = None
        """Of the checkpoint that was begun or loaded last."""
        self._is_loaded = False
        self._final_step: int | None = None
        """Saved because the run ends there."""
        self._frozen_sums: dict[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the last save.

        Raises:
            SaveError: It has failed, and no later one makes up for it.
        """
        if kind is not None:
            return
        last = self._wait()
        if self._final_step is None:
            return
        if last is None:
            raise SaveError(
                f"checkpoint: the run ends after step {self._final_step} and could not be saved there (the console "
                "says why); needs a place to write; mend it, and start again to go on from the checkpoint before"
            )
        if self._final_step < self._config.num_steps:
            self._note(f"saved after step {self._final_step}: {last}; the same command goes on from there")

    def load(self, point: ResumePoint) -> None:
        """Take up what was saved; models and optimizers have been built and hold what a fresh run begins with.

        Raises:
            CheckpointError: It is not whole, or not of these models.
        """
        where = f"checkpoint.resume: {point.folder}"
        check_frozen(point.record, self._sums_of_frozen(), where=where)
        wanted = [block for role in self._roles for block in role.blocks(own_share=False)]
        load(point.folder, wanted, group=self._group, tick=lambda: self._progress.tick("load the checkpoint"))
        for role in self._roles:
            if role.model is not None and role.optimizer is not None:
                weights_loaded(role.model, role.optimizer, with_masters=True)
                record = _read_json(point.folder / _role_file(role.name))
                restore_record(role.model, role.optimizer, record, where=where)
        own = [block for role in self._roles for block in role.blocks(own_share=True)]
        saved = first_does(lambda: read_manifest(point.folder).state, self._group)
        held = check_state(point.folder, own, group=self._group)
        self._note(f"resume: saved   {saved.render()}\n        loaded  {held.render()}")
        self._set_random_states(point)
        if point.is_own:
            self._saved_step, self._is_loaded = point.record.step, True

    def step_done(self, state: LoopState) -> None:
        """Save and export the state between two steps, as far as they are due; the last step's is left to `finish`.

        What cannot be written costs a line on the console, and the run goes on: the next one may be.
        """
        checkpoint = self._config.checkpoint
        if checkpoint.due(state.step) and state.step < self._config.num_steps:
            self._save(state)
        if checkpoint.export_due(state.step):
            with self._timers.phase("save"):
                self._wait()
                self._export_step(state.step)

    def _export_step(self, step: int) -> None:
        fault = ""
        try:
            self._export(self._exports / f"step_{step:08d}")
        except SaveError as error:
            fault = str(error)
        said = next((one for one in gather(fault, self._group) if one), "")  # rank 0 may be outside the pool
        if said:
            self._note(f"step {step}: {said}; the run goes on")

    def finish(self, state: LoopState) -> None:
        """Save the state in which the run ends: always when a stop ends it, else when it has checkpoints at all.

        So a run that was saved once never repeats steps that are done. Returns when it is on the disk: whatever else
        the end of a run writes may fail, and a rank that fails takes a save in the background with it.
        """
        is_stopped = state.step < self._config.num_steps
        if not (is_stopped or self._config.checkpoint.every_steps or self._saved_step is not None):
            return
        if self._saved_step == state.step and self._is_loaded:
            return
        self._final_step = state.step
        if self._saved_step != state.step or self._wait() is None:  # a save that failed is tried again
            self._save(state)
        with self._timers.phase("save"):
            self._wait()

    def _wait(self) -> Path | None:
        with self._progress.waiting("save"):
            return self._saver.wait()

    def _save(self, state: LoopState) -> None:
        with self._timers.phase("save"), self._progress.waiting("save"):
            self._saver.save(state.step, self._content(state))
        self._saved_step, self._is_loaded = state.step, False

    def _content(self, state: LoopState) -> Content:
        """What this rank brings."""
        files: dict[str, bytes] = {_rng_file(self._rank): self._random_states()}
        empty_objects: list[str] = []
        for role in self._roles:
            if role.model is not None and self._rank == role.model.groups.grid.ranks[0]:
                files[_role_file(role.name)] = _json(model_record(role.model, role.optimizer))
                empty_objects += [f"{role.name}.{key}" for key in extra_state_keys(role.model.spec)]
        sums = self._sums_of_frozen()
        if self._rank == 0:
            record = replace(self._record, step=state.step, state=state.to_dict(), frozen=sums)
            files[DRIVER_FILE] = record.to_json()
            files["config.yaml"] = to_yaml(self._config).encode()
        blocks = [block for role in self._roles for block in role.blocks(own_share=True)]
        return Content(blocks, files, tuple(empty_objects))

    def _sums_of_frozen(self) -> dict[str, str]:
        """Checksum of the weights of each frozen role, whatever its layout. Collective the first time."""
        if self._frozen_sums is None:
            mine = {name: _sum_of(model) for name, model in self._frozen.items()}
            everywhere = gather(mine, self._group)
            totals = {name: sum(part[name] for part in everywhere) % 2**64 for name in mine}
            self._frozen_sums = {name: f"{total:016x}" for name, total in totals.items()}
        return self._frozen_sums

    def _models(self) -> dict[str, MegatronModel]:
        """Those that have a part on this rank."""
        trained = {role.name: role.model for role in self._roles}
        return {name: model for name, model in {**trained, **self._frozen}.items() if model is not None}

    def _random_states(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(rng_state(self._models()), buffer)
        return buffer.getvalue()

    def _set_random_states(self, point: ResumePoint) -> None:
        if not same_ranks(point.record, self._record):
            self._note("resume: random states are of ranks with other parts, and left; nothing here draws from them")
            return
        path = point.folder / _rng_file(self._rank)
        set_rng_state(torch.load(path, weights_only=True), self._models(), where=str(path))


def _sum_of(model: MegatronModel | None) -> int:
    """Of this rank's share of a model's weights: shares of all ranks add up to the model's."""
    blocks = [] if model is None else model_blocks(model, own_share=True)
    return wrapped(sum(checksums([(block.key, block.box, block.data) for block in blocks])))


def _role_file(role: str) -> str:
    return f"roles/{role}.json"


def _rng_file(rank: int) -> str:
    return f"rng/rank_{rank:05d}.pt"


def _json(record: Mapping[str, object]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _read_json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); needs a whole checkpoint; take another one"
        ) from error
    assert isinstance(found, dict), f"{path}: a record is an object"
    return found
