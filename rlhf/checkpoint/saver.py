"""Saves of a run, one after the other, in the background: every rank writes its share, the first rank makes it count.

Knows no model: a rank brings blocks of tensors and small files.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shutil import rmtree

from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf.checkpoint.folder import begin, publish, step_name, sweep
from rlhf.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest
from rlhf.checkpoint.prune import Pruner
from rlhf.checkpoint.state_checksum import StateChecksum
from rlhf.checkpoint.store.data_file import HostCopy, WrittenFile, streamed, write_data_file
from rlhf.checkpoint.store.durable import flush_entries, flush_folder, write_file_whole
from rlhf.checkpoint.store.file_plan import FilePlan, Window, plan_file
from rlhf.checkpoint.store.torch_dist import RESERVED, data_file_name, write_metadata
from rlhf.checkpoint.together import from_first, place, to_first
from rlhf.errors import CheckpointError
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import wrapped

LOOK_S = 1.0
"""How often somebody who waits for a save looks whether it moves."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one rank brings to a checkpoint."""

    blocks: Sequence[Block]
    """Together with those of all other ranks: each element of each stored tensor once."""
    files: Mapping[str, bytes]
    """By name relative to the checkpoint's folder (`roles/actor.json`); one rank brings a name, no other does."""
    empty_objects: tuple[str, ...] = ()
    """Keys of objects without content, see `write_metadata`; ranks may bring the same."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank says when it has written its share."""

    files: tuple[WrittenFile, ...]
    empty_objects: tuple[str, ...]
    fault: str | None


class Saver:
    """Saves checkpoints of one run. All ranks of the job make one and call its methods in the same order.

    `group` is a gloo group of these ranks that nothing else uses, since a save in the background speaks over it; its
    timeout bounds how long ranks wait for the slowest one's disk.

    A save that fails (disk full, a file that cannot be written, blocks that do not cover a tensor) is told to `note`,
    leaves nothing behind and touches no other checkpoint; training goes on. A rank that is lost, or does not finish
    within the group's timeout, makes `save` or `wait` raise torch's error on the others: no later save could succeed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: ProcessGroup | None,
        keep_last: int,
        keep_every: int,
        asynchronous: bool,
        note: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Local; the first rank makes the folder and removes what a killed job has left in it.

        Args:
            folder: For the checkpoints of this run alone, on a file system that all ranks see.
            group: See above; None for a process alone.
            keep_last: So many of the newest whole checkpoints are kept, at least 1.
            keep_every: Those of steps that it divides are kept for ever; 0 keeps none.
            asynchronous: Training goes on once a rank's share is copied to host memory, which is kept for the next
                save: as much as the share. Otherwise `save` returns when all is written, and takes 10 MiB.
            note: Takes a line for the console, on the first rank, also from another thread.
            tick: Called by `save` and `wait` whenever more of this rank's share has gone to the disk, so that a slow
                disk is told from a hung rank.

        Raises:
            CheckpointError: On the first rank: the folder cannot be written to.
        """
        assert keep_last >= 1, f"keep_last {keep_last}: the newest checkpoint must be kept"
        assert keep_every >= 0, f"keep_every {keep_every}"
        self._folder, self._group, self._note, self._tick = folder, group, note, tick
        self._number, self._count = place(group)
        self._pruner = Pruner(folder, keep_last=keep_last, keep_every=keep_every, group=group, note=note)
        self._host = HostCopy() if asynchronous else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[Path | None] | None = None
        self._plan: tuple[object, FilePlan] | None = None
        self._windows = 0
        if self._number == 0:
            self._open()

    def _open(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            flush_entries(self._folder.parent)
            sweep(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints: {error.filename or self._folder}: {error.strerror}; needs a folder that can be written "
                "to; mend it, or run elsewhere with log.folder=FOLDER"
            ) from error

    def save(self, step: int, content: Content) -> None:
        """Save a checkpoint of a step; waits for the save before.

        Collective over the group. When it returns, the blocks' data may change; asynchronous: when the checkpoint is
        there is known after `wait`.
        """
        self.wait()
        plan = self._planned(content.blocks)
        if self._host is None:
            memory = self._counted(streamed(plan, content.blocks), self._tick)
            self._running = Future()
            self._running.set_result(self._write(step, plan, memory, content))
            return
        self._host.take(plan, content.blocks)
        memory = self._counted(self._host.of)
        files = Content((), content.files, content.empty_objects)
        self._running = self._thread.submit(self._write, step, plan, memory, files)

    def wait(self) -> Path | None:
        """Wait until the last save has ended; its folder, or None when it failed or nothing was saved. Collective.

        To be called before the process group is destroyed.
        """
        if self._running is None:
            return None
        seen = self._windows
        while wait_for([self._running], timeout=LOOK_S).not_done:
            if self._windows != seen:
                seen = self._windows
                self._tick()
        return self._running.result()

    def _counted(
        self, memory: Callable[[Window], Tensor], tick: Callable[[], None] = lambda: None
    ) -> Callable[[Window], Tensor]:
        """The same memory; each window that is asked for counts."""

        def of(window: Window) -> Tensor:
            self._windows += 1
            tick()
            return memory(window)

        return of

    def _planned(self, blocks: Sequence[Block]) -> FilePlan:
        """Where the blocks lie in this rank's file; the plan of the save before when they are cut alike."""
        alike = tuple((one.key, one.shape, one.box, one.data.dtype) for one in blocks)
        if self._plan is None or self._plan[0] != alike:
            self._plan = (alike, plan_file(blocks))
        return self._plan[1]

    def _write(self, step: int, plan: FilePlan, memory: Callable[[Window], Tensor], content: Content) -> Path | None:
        """All of a save but the copy."""
        leads = self._number == 0
        partial, fault = from_first(self._begin(step) if leads else (None, None), self._group)
        if partial is None:
            self._failed(step, fault)
            return None
        reports = to_first(self._write_share(partial, plan, memory, content), self._group)
        fault = from_first(self._complete(step, partial, reports) if leads else None, self._group)
        if fault is not None:
            self._failed(step, fault)
            return None
        self._pruner.prune(step)
        return self._folder / step_name(step)

    def _begin(self, step: int) -> tuple[Path | None, str | None]:
        try:
            return begin(self._folder, step), None
        except OSError as error:
            return None, _said(error)

    def _write_share(
        self, partial: Path, plan: FilePlan, memory: Callable[[Window], Tensor], content: Content
    ) -> _Report:
        """This rank's files."""
        written: list[WrittenFile] = []
        try:
            if plan.items:
                written.append(write_data_file(partial, data_file_name(self._number), plan, memory))
            for name, text in content.files.items():
                check_name(name)
                written.append(write_file_whole(partial, name, text))
        except (OSError, CheckpointError) as error:
            return _Report((), (), _said(error))
        return _Report(tuple(written), content.empty_objects, None)

    def _complete(self, step: int, partial: Path, reports: Sequence[_Report]) -> str | None:
        """On the first rank: make a folder of files a checkpoint. What went wrong, or None."""
        faults = [f"rank {number}: {one.fault}" for number, one in enumerate(reports) if one.fault is not None]
        if not faults:
            try:
                self._finish(step, partial, reports)
            except (OSError, CheckpointError) as error:
                faults = [_said(error)]
        if not faults:
            return None
        rmtree(partial, ignore_errors=True)
        return faults[0] + (f" (and {len(faults) - 1} more ranks)" if len(faults) > 1 else "")

    def _finish(self, step: int, partial: Path, reports: Sequence[_Report]) -> None:
        written = [file for one in reports for file in one.files]
        objects = sorted({key for one in reports for key in one.empty_objects})
        files = [*written, *write_metadata(partial, written, common={"iteration": step}, empty_objects=objects)]
        sums, num_bytes = Counter[str](), 0
        for file in written:
            for key, number in file.sums.items():
                sums[key] += number
            num_bytes += sum(item.box.num_elements * item.dtype.itemsize for item in file.items)
        state = StateChecksum({key: wrapped(number) for key, number in sums.items()}, num_bytes)
        records = {file.name: FileRecord(file.size, file.checksum) for file in files}
        write_file_whole(partial, MANIFEST_FILE, Manifest(step, self._count, records, state).render())
        flush_folder(partial)
        for undone in publish(partial, self._folder / step_name(step)):
            self._note(f"checkpoint of step {step} is whole, but {undone}")

    def _failed(self, step: int, fault: str | None) -> None:
        if self._number == 0:
            self._note(f"checkpoint of step {step} was not saved: {fault}; the ones before are as they were")


def check_name(name: str) -> None:
    """Nothing, when a file may have this name in a checkpoint.

    Raises:
        CheckpointError: It lies outside, or is a name of the format.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or str(parts) != name or name == ".":
        raise CheckpointError(f"file {name}: is no plain relative path; needs one inside the checkpoint; rename it")
    if name in RESERVED or name == MANIFEST_FILE or parts.suffix == ".distcp":
        raise CheckpointError(f"file {name}: is a file of the checkpoint's own; needs another name; rename it")


def _said(error: OSError | CheckpointError) -> str:
    return f"{error.filename or 'write'}: {error.strerror}" if isinstance(error, OSError) else str(error)
