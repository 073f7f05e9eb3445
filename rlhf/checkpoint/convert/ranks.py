"""Processes that convert together: who writes what, a fault that all hear of, a folder that is whole or absent."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch.distributed import ProcessGroup

from rlhf.dist.agree import gather
from rlhf.dist.job import cpu_ranks
from rlhf.errors import CheckpointError, RlhfError

T = TypeVar("T")

BAD_INPUT = 2
"""Exit code for what cannot be converted."""

TIMEOUT_S = 6 * 3600.0
"""How long processes wait for one another: the slowest may have terabytes to write."""


@dataclass(frozen=True, slots=True)
class Crew:
    """This process among those that convert together."""

    rank: int
    size: int
    group: ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether it makes and shows folders, and speaks."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """The work's result, once it is done on all. Collective; the work itself must not communicate.

        Raises:
            CheckpointError: On all of them, if the work failed on one; its message is the first's.
        """
        done, fault = [], ""
        try:
            done.append(work())
        except RlhfError as error:
            fault = str(error)
        except OSError as error:
            said = f"{error.filename or 'a file'}: {error.strerror or error}"
            fault = f"{said}; needs room and the right to read and write; make room, or give another folder"
        faults = [one for one in gather(fault, self.group) if one]
        if faults:
            raise CheckpointError(faults[0])
        return done[0]

    def lead(self, work: Callable[[], None]) -> None:
        """Do something on the first process, while the others wait. Collective.

        Raises:
            CheckpointError: See `together`.
        """
        self.together(work if self.leads else lambda: None)

    def all(self, value: T) -> list[T]:
        """Each process's value, small ones only. Collective."""
        return gather(value, self.group)

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Places of the things that are this process's to do: each thing is one process's, the largest first."""
        load = [0] * self.size
        mine = []
        for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
            least = min(range(self.size), key=lambda rank: (load[rank], rank))
            load[least] += sizes[place]
            if least == self.rank:
                mine.append(place)
        return sorted(mine)


def with_crew(work: Callable[[Crew], int]) -> int:
    """Run a command's work on this process and its peers under torchrun, and give its exit code.

    A fault that all of them have met is the leading one's to tell; the others leave with BAD_INPUT.

    Raises:
        RlhfError: On the leading process.
    """
    with cpu_ranks(timeout_s=TIMEOUT_S) as ranks:
        crew = Crew(ranks.rank, ranks.world_size, ranks.everyone)
        try:
            return work(crew)
        except RlhfError:
            if crew.leads:
                raise
            return BAD_INPUT


@contextmanager
def appearing(folder: Path, source: Path, crew: Crew, *, overwrite: bool) -> Iterator[Path]:
    """A hidden folder to write to that becomes `folder` when the block ends well, and else is removed. Collective.

    What a killed process left of an earlier try is removed first.

    Raises:
        CheckpointError: See `refuse_existing`.
    """
    partial, replaced = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "replaced"))

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def show() -> None:
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        try:
            partial.rename(folder)
        except OSError:
            if replaced.exists():
                replaced.rename(folder)
            raise
        shutil.rmtree(replaced, ignore_errors=True)

    crew.together(lambda: refuse_existing(folder, source, overwrite=overwrite))
    is_whole = False
    try:
        crew.lead(begin)
        yield partial
        crew.lead(show)
        is_whole = True
    finally:
        if not is_whole and crew.leads:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(folder: Path, source: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError if there is such a folder and it may not be replaced, or if it is or holds the source.

    A file or a link of that name is not replaced at all.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        what = "a link" if folder.is_symlink() else "a file"
        raise CheckpointError(f"{folder}: is {what}; needs a new folder, or one to replace; choose another name")
    if folder.exists() and not overwrite:
        raise CheckpointError(f"{folder}: exists; needs a new folder; choose another name, or say --overwrite")
    if source.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{folder}: is or holds what is read, {source}; needs another folder; choose another name"
        )
