"""What happens to engines that hold other weights than they were given: the run stops, or they are left out."""

from collections.abc import Sequence
from enum import StrEnum

from rlhf.errors import WeightSyncError
from rlhf.reshard.verify import Mismatch

MOST_IN_A_ROW = 3
"""Transfers in a row that may leave an engine wrong; then it is no accident."""

SHOWN = 4
"""Mismatches in an error's text."""

Engine = tuple[int, ...]
"""Destination ranks that hold one copy of the model."""


class OnMismatch(StrEnum):
    """Policy for a transfer after which the two sides differ."""

    STOP = "stop"
    """All ranks raise."""
    QUARANTINE = "quarantine"
    """Everything is sent again, once; an engine that is still wrong is left out until the next transfer."""


class Quarantine:
    """Which engines are left out. All ranks of both pools are told the same, so all come to the same."""

    def __init__(self, policy: OnMismatch, engines: Sequence[Engine]) -> None:
        self._policy = policy
        self._bad_in_a_row = dict.fromkeys(engines, 0)

    def admits_another_try(self, found: Sequence[Mismatch]) -> bool:
        """Whether everything should be sent again.

        Raises:
            WeightSyncError: The policy is to stop at the first mismatch.
        """
        if found and self._policy is OnMismatch.STOP:
            raise WeightSyncError(f"reshard: after the transfer {listed(found)}; {_ADVICE}")
        return bool(found)

    def left_out(self, found: Sequence[Mismatch]) -> tuple[Engine, ...]:
        """Engines that are wrong for good this time, from what was found in the end.

        Raises:
            WeightSyncError: One of them was so `MOST_IN_A_ROW` times in a row.
        """
        wrong = {one.rank for one in found}
        out = tuple(engine for engine in self._bad_in_a_row if wrong & set(engine))
        for engine in self._bad_in_a_row:
            self._bad_in_a_row[engine] = self._bad_in_a_row[engine] + 1 if engine in out else 0
        worst = max(self._bad_in_a_row.values(), default=0)
        if worst == MOST_IN_A_ROW:
            raise WeightSyncError(
                f"reshard: for {worst} transfers in a row, sent twice each, {listed(found)}; {_ADVICE}"
            )
        return out


def listed(found: Sequence[Mismatch]) -> str:
    """The first few as text."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(str(one) for one in found[:SHOWN]) + more


_ADVICE = (
    "needs equal checksums; do not write to parameters while a transfer runs, else look for faulty memory or links"
)
