"""Where an engine's rows come from and go to while it runs. Knows no engine, no pool and no process group."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from rlhf.data.batch import PromptBatch, Rollout
from rlhf.errors import EngineError


class Verdict(IntEnum):
    """What a feed wants its engine to do."""

    GO_ON = 0
    """More rows may come; ask again."""
    END = 1
    """No more rows; what was taken is run to its end. May still be followed by ABORT, not by GO_ON."""
    ABORT = 2
    """Stop now. Rows that have not ended come back with finish reason ABORT and the tokens that they have."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine still has to do."""

    rows: int
    """Taken and not yet given back."""
    outstanding_tokens: int
    """Most tokens that these rows may yet get: of each, max_new_tokens less those it has, as far as the engine
    knows."""


@dataclass(frozen=True, slots=True)
class Work:
    """Rows for an engine. Samples of one prompt that come together share what is computed for it."""

    prompts: PromptBatch
    begun: Rollout | None = None
    """Responses so far to just these prompts, in their order, to be continued. Their tokens count towards
    max_new_tokens and come back in front of the new ones, with their own log-probs, provenance and policy versions.
    Rows whose finish reason is not ABORT are complete, and come back as they are."""
    attempt: int = 0
    """Of `sample_seed`. A row that is continued keeps its attempt: its next tokens are then those that it would have
    got without the interruption, under the same weights."""

    def __post_init__(self) -> None:
        if self.prompts.sample_ids.unique().numel() != len(self.prompts):
            raise EngineError(
                f"feed: samples {self.prompts.sample_ids.tolist()[:8]} are not all different; needs each once; hand in "
                "another attempt apart"
            )
        if self.begun is not None and not torch.equal(self.begun.prompts.sample_ids, self.prompts.sample_ids):
            raise EngineError(
                f"feed: responses begun for samples {self.begun.prompts.sample_ids.tolist()[:8]}, but prompts of "
                f"samples {self.prompts.sample_ids.tolist()[:8]}; needs the same rows in one order; select both alike"
            )


class Feed(Protocol):
    """Hands rows to an engine while it runs and takes its responses.

    Called on the engine's leader only, by the thread that is in `RolloutEngine.run`, and never during a collective: it
    may talk to others, but what it takes its time over, the engine waits for. What it raises ends the run: unfinished
    rows are given up without a word, `run` raises it on the leader and an EngineError on the engine's other ranks, and
    the engine can be used again.

    In each round an engine calls `done` (where rows have ended), then `verdict`, then, where that says GO_ON and it
    could begin more rows than it has, `take` until it is full or gets None.
    """

    def take(self, load: Load) -> Work | None:
        """The next rows, at best a few whole groups of one prompt, or None: nothing now.

        The engine holds what it cannot begin at once. It asks again a few milliseconds later.
        """
        ...

    def done(self, finished: Rollout) -> None:
        """Rows that ended since the last call, in the order of ending; each row taken comes back exactly once.

        Its prompts are those of the `Work`. A row that was aborted before its first token has none.
        """
        ...

    def verdict(self) -> Verdict:
        """Whether to go on. An engine that is told END returns from `run` once it has given back what it took."""
        ...


class FixedRows:
    """A `Feed` of rows that are all known, handed out as fast as the engine takes them.

    A sample that is among the works twice (as another attempt) is handed out again once it has come back.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._waiting, self._finished = deque(works), list[Rollout]()
        self._places: dict[int, int] = {}  # of rows that are out: which of all rows
        self._num_rows, self._order = 0, list[int]()

    def take(self, load: Load) -> Work | None:
        """See `Feed.take`."""
        if not self._waiting:
            return None
        sample_ids = self._waiting[0].prompts.sample_ids.tolist()
        if any(sample_id in self._places for sample_id in sample_ids):
            return None
        self._places |= {sample_id: self._num_rows + at for at, sample_id in enumerate(sample_ids)}
        self._num_rows += len(sample_ids)
        return self._waiting.popleft()

    def done(self, finished: Rollout) -> None:
        """See `Feed.done`."""
        self._order += [self._places.pop(sample_id) for sample_id in finished.prompts.sample_ids.tolist()]
        self._finished.append(finished)

    def verdict(self) -> Verdict:
        """See `Feed.verdict`."""
        return Verdict.GO_ON if self._waiting else Verdict.END

    def ordered(self) -> Rollout:
        """All rows in the order of the works, once the run has ended."""
        assert not self._waiting and len(self._order) == self._num_rows, "a row was lost"  # noqa: PT018
        rollout = Rollout.concat(self._finished) if self._finished else Rollout.empty()
        return rollout.select(torch.tensor(self._order, dtype=torch.int64).argsort())
