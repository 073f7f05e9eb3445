"""Which checkpoints may go after a save: all but the newest whole ones and those of steps that are kept for ever."""

from collections.abc import Callable
from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.checkpoint.folder import remove, saved, step_of
from rlhf.checkpoint.together import from_first, place
from rlhf.checkpoint.whole import find_fault


class Pruner:
    """Keeps the newest whole checkpoints of a run.

    What this job has saved is taken as whole; what was there before is read once before it may count, so a damaged one
    never stands for a good one that is removed. One that cannot be read neither counts nor goes: it may be whole.
    Checkpoints of later steps, which a run has left behind that went back, are not touched.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_every: int,
        group: ProcessGroup | None,
        note: Callable[[str], None],
    ) -> None:
        self._folder, self._group, self._note = folder, group, note
        self._keep_last, self._keep_every = keep_last, keep_every
        self._whole: dict[int, bool] = {}
        """By step, of those that are known to be whole or damaged."""
        self._leads = place(group)[0] == 0

    def prune(self, step: int) -> None:
        """Remove what need not be kept once the checkpoint of `step` is there. Collective over the group."""
        self._whole[step] = True
        old = [path for path in saved(self._folder) if step_of(path) <= step] if self._leads else []
        kept, unknown = set[str](), set[str]()
        for path in from_first(old, self._group):
            if len(kept) == self._keep_last:
                break
            if (is_whole := self._is_whole(path)) is None:
                unknown.add(path.name)
            elif is_whole:
                kept.add(path.name)
        for path in old:
            if path.name not in kept | unknown and not self._is_for_ever(step_of(path)):
                self._remove(path)

    def _is_whole(self, path: Path) -> bool | None:
        """None: it cannot be read now. Collective: all ranks know the same of each checkpoint."""
        step = step_of(path)
        if step not in self._whole:
            fault = find_fault(path, group=self._group)
            if fault is not None and not fault.is_damage:
                self._note(f"checkpoint {path}: {fault.what}; it stays, and does not count as one that is kept")
                return None
            self._whole[step] = fault is None
        return self._whole[step]

    def _is_for_ever(self, step: int) -> bool:
        return self._keep_every > 0 and step % self._keep_every == 0

    def _remove(self, path: Path) -> None:
        try:
            remove(path)
        except OSError as error:
            self._note(f"checkpoint {path} could not be removed: {error.strerror}; remove it by hand")
