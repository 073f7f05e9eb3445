"""Last tokens of the running rows, in host memory, where strings may end a response."""

from collections import deque
from collections.abc import Sequence

from rlhf.rollout.stopping import StopStrings


class Tails:
    """What stop strings must see of each response; on the leader, by the rows' places in the submission."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._tails: dict[int, deque[int]] = {}

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """A row whose response already has these tokens."""
        self._tails[row] = deque(tokens, maxlen=self._strings.span)

    def ended(self, rows: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """These rows got one more token each: which of them it ends."""
        return [self._grow(row, token) for row, token in zip(rows, tokens, strict=True)]

    def forget(self, rows: Sequence[int]) -> None:
        """These rows get no more tokens."""
        for row in rows:
            self._tails.pop(row, None)

    def _grow(self, row: int, token: int) -> bool:
        tail = self._tails.setdefault(row, deque(maxlen=self._strings.span))
        tail.append(token)
        return self._strings.ended(list(tail))
