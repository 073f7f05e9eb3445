"""What a tracker must be told again at each start of a run: its id there, and how many times it was called so far."""

import json
import secrets
from pathlib import Path

from rlhf.metrics.whole_file import write_whole


class TrackerRecord:
    """A file `{"id": ..., "calls": ...}` in the run folder, made when it is missing.

    A tracker that counts its steps itself takes none below the last one. A resume does some steps again, so calls are
    counted, over all starts of the run: on the disk before the number is used, so that no kill makes it come twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.id: str = found.get("id", secrets.token_hex(8))
        """Of the run at the tracker."""
        self._calls: int = found.get("calls", 0)
        self._write()

    def next_call(self) -> int:
        """0, 1, 2, ..."""
        self._calls += 1
        self._write()
        return self._calls - 1

    def _write(self) -> None:
        write_whole(self._path, json.dumps({"id": self.id, "calls": self._calls}) + "\n")
