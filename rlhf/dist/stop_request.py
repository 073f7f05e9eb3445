"""A request to save and leave: the file `stop` in the run folder, seen by all ranks at the same step."""

from pathlib import Path

from torch.distributed import ProcessGroup

from rlhf.dist.agree import any_of


class StopRequest:
    """Whether somebody asked the run to stop (`scripts/launch.sh` writes the file when it gets SIGUSR1)."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / "stop"
        self._accepted = False

    @property
    def accepted(self) -> bool:
        """The ranks agreed to stop; the job then leaves with code 75."""
        return self._accepted

    def agreed(self, group: ProcessGroup) -> bool:
        """True on all ranks of the group when one of them sees the request. Collective over `group` (gloo).

        Called at step boundaries; after True the loop saves a checkpoint and returns.
        """
        self._accepted = any_of(self.path.exists(), group)
        return self._accepted
