"""Which checkpoint a run goes on from: found and compared before anything of an earlier start is touched."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.checkpoint.folder import newest_whole, saved, settle
from rlhf.checkpoint.whole import find_damage
from rlhf.config.checkpoint import AUTO, NEVER
from rlhf.dist.agree import first_does
from rlhf.errors import CheckpointError
from rlhf.trainers.run_changes import check_changes
from rlhf.trainers.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A whole checkpoint that this run may go on from."""

    folder: Path
    record: RunRecord
    """Of the run that saved it."""
    is_own: bool
    """It lies in the run's own folder, whose records go on; else the run has begun elsewhere."""

    def settle(self, *, note: Callable[[str], None]) -> None:
        """Let nothing of the run's own folder come after it. One process calls it, before the run goes on.

        Raises:
            CheckpointError: The folder cannot be written to.
        """
        if not self.is_own:
            return
        try:
            left = settle(self.folder.parent, self.record.step)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.resume: {error.filename or self.folder.parent}: {error.strerror}; needs a folder of "
                "checkpoints that can be written to; mend it, or go on elsewhere with name=NAME"
            ) from error
        for path in left:
            note(f"checkpoint of a later step, not whole, is now {path}; remove it once nobody needs it")


def find_resume(
    setting: str,
    now: RunRecord,
    *,
    run_folder: Path,
    group: ProcessGroup,
    note: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> ResumePoint | None:
    """What `checkpoint.resume` comes to; None: the run begins anew. Collective over the job.

    Args:
        setting: The setting.
        now: The run that is to go on.
        run_folder: Its folder, maybe not there yet.
        group: gloo, over all ranks of the job.
        note: Told what is damaged and what has changed; does something on rank 0 only.
        tick: Called for each piece of a checkpoint that this rank has read.

    Raises:
        CheckpointError: The checkpoint that the setting names is not there or not whole, or none of the run's own is,
            or the run that saved one differs in what must stay.
    """
    if setting == NEVER:
        return None
    own = run_folder / "checkpoints"
    found = newest_whole(own, group=group, note=note, tick=tick)
    if setting != AUTO:
        found = _named(Path(setting), own, found, group=group, tick=tick)
    if found is None:
        if left := first_does(lambda: [path.name for path in saved(own)], group):
            raise CheckpointError(
                f"checkpoint.resume: none of {', '.join(left)} in {own} is whole (the console says why); needs one to "
                "go on from; mend what lies there, or begin anew with checkpoint.resume=never, which moves it aside"
            )
        return None
    is_own = _same(found.parent, own)

    def look() -> tuple[RunRecord, list[str]]:
        then = RunRecord.read(found)
        return then, check_changes(then, now, where=f"checkpoint.resume: {found}")

    then, changes = first_does(look, group)
    note("\n  ".join([f"resume: from step {then.step} of {now.settings['num_steps']}, {found}", *changes]))
    return ResumePoint(found, then, is_own)


def _named(named: Path, own: Path, newest: Path | None, *, group: ProcessGroup, tick: Callable[[], None]) -> Path:
    """The run's own newest checkpoint where there is one, else the one that the setting names."""
    if newest is not None:
        if _same(named.parent, own) and not _same(named, newest):
            raise CheckpointError(
                f"checkpoint.resume: {named} is this run's own, and {newest.name} is newer; needs the newest, since a "
                "run has one record; begin another run from it with name=NAME, or move the newer ones away"
            )
        return newest
    damage = find_damage(named, group=group, tick=tick)
    if damage is not None:
        raise CheckpointError(
            f"checkpoint.resume: {named} is no whole checkpoint ({damage}); needs auto, never or the folder of one, "
            "such as runs/NAME/checkpoints/step_00000010; correct it"
        )
    return named


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
