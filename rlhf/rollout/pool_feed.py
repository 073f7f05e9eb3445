"""What one engine of a pool is fed: units that its leader claims, until enough groups are answered anywhere."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.data.batch import FinishReason, Rollout
from rlhf.rollout.answers import Answers, Asked
from rlhf.rollout.claims import Claims
from rlhf.rollout.feed import Load, Verdict, Work
from rlhf.rollout.routes import Group, Unit

POLL_S = 0.02
"""How often the store is asked again when there was nothing to claim, and how far the others are."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one call asks of the pool; the same on all leaders."""

    asked: Asked
    groups: tuple[Group, ...]
    rows: tuple[Tensor, ...]
    """int64; the rows of `asked` in each group."""
    begun: Answers
    """Of some of the rows: responses to be continued, or already whole."""
    keep: int
    """Groups wanted: the first so many that are whole."""
    attempt: int

    @staticmethod
    def of(
        asked: Asked, begun: Answers, *, keep: int | None, attempt: int, expected_tokens: float, max_new_tokens: int
    ) -> "Question":
        """From the rows of all leaders.

        Args:
            asked: All rows; those of one prompt are a group.
            begun: See above.
            keep: See above; None: all.
            attempt: Of `sample_seed`.
            expected_tokens: Length that a response is expected to have.
            max_new_tokens: Length that it can have.
        """
        rows: dict[int, list[int]] = {}
        for row, prompt_id in enumerate(asked.prompt_ids.tolist()):
            rows.setdefault(prompt_id, []).append(row)
        so_far = _lengths(begun)
        whole = {
            i
            for i, reason in zip(begun.sample_ids.tolist(), begun.finish_reasons.tolist(), strict=True)
            if reason != FinishReason.ABORT
        }
        prompts, ids = asked.tokens.rows(), asked.sample_ids.tolist()

        def further(sample_id: int) -> float:
            """One that has run for long is expected to run as long again."""
            has = so_far.get(sample_id, 0)
            return 0 if sample_id in whole else has + min(max(expected_tokens, has), max_new_tokens - has)

        groups = [
            Group(
                prompt=tuple(prompts[members[0]].tolist()),
                rows=len(members),
                tokens=prompts[members[0]].numel() + round(sum(further(ids[row]) for row in members)),
            )
            for members in rows.values()
        ]
        return Question(
            asked,
            tuple(groups),
            tuple(torch.tensor(members, dtype=torch.int64) for members in rows.values()),
            begun,
            len(groups) if keep is None else min(keep, len(groups)),
            attempt,
        )

    def sample_ids(self, group: int) -> list[int]:
        """Of a group's rows."""
        return self.asked.sample_ids[self.rows[group]].tolist()

    def work(self, groups: Sequence[int]) -> Work:
        """Rows of some groups for an engine."""
        asked = self.asked.select(torch.cat([self.rows[at] for at in groups]))
        known = torch.isin(asked.sample_ids, self.begun.sample_ids)
        prompts = asked.prompts()
        if not bool(known.any()):
            return Work(prompts, attempt=self.attempt)
        fresh = Answers.none_yet(asked.select((~known).nonzero().flatten()))
        begun = Answers.concat([self.begun, fresh]).ordered_as(asked.sample_ids)
        return Work(prompts, begun.rollout(prompts), self.attempt)


def _lengths(answers: Answers) -> dict[int, int]:
    """Tokens of each response, by sample id."""
    return dict(zip(answers.sample_ids.tolist(), answers.responses.lengths.tolist(), strict=True))


@dataclass(slots=True)
class PoolFeed:
    """The `Feed` of one engine in one call, and what came of it."""

    question: Question
    claims: Claims
    max_rows: int
    """No more is taken while the engine has so many rows."""
    in_batches: bool
    """A unit is taken only by an engine that has nothing to do."""
    clock: Callable[[], float] = time.monotonic
    place: dict[int, int] = field(default_factory=dict)
    """For each group that became whole here: how many were by then, over all engines; counted from 1."""
    queue_s: list[float] = field(default_factory=list)
    """For each row taken: seconds from the call until then."""
    _open: dict[int, int] = field(default_factory=dict)
    """Groups that are not whole, and how many of their rows are missing."""
    _group_of: dict[int, int] = field(default_factory=dict)
    _units: list[Unit] = field(default_factory=list)
    _ended: list[Rollout] = field(default_factory=list)
    _num_finished: int = 0
    _began_at: float = field(init=False)
    _claim_at: float = 0.0
    _look_at: float = 0.0

    def __post_init__(self) -> None:
        self._began_at = self.clock()

    def take(self, load: Load) -> Work | None:
        """See `Feed.take`."""
        now = self.clock()
        if load.rows >= (1 if self.in_batches else self.max_rows) or now < self._claim_at:
            return None
        unit = self.claims.next()
        if unit is None:
            self._claim_at = now + POLL_S
            return None
        work = self.question.work(unit.groups)
        self._units.append(unit)
        for at in unit.groups:
            self._open[at] = self.question.groups[at].rows
            self._group_of |= dict.fromkeys(self.question.sample_ids(at), at)
        self.queue_s += [now - self._began_at] * len(work.prompts)
        return work

    def done(self, finished: Rollout) -> None:
        """See `Feed.done`."""
        self._ended.append(finished)
        ids, reasons = finished.prompts.sample_ids.tolist(), finished.finish_reasons.tolist()
        for sample_id, reason in zip(ids, reasons, strict=True):
            at = self._group_of[sample_id]
            self._open[at] -= reason != FinishReason.ABORT
            if not self._open[at]:
                del self._open[at]
                self.place[at] = self._num_finished = self.claims.finish(self.question.groups[at].tokens)

    def verdict(self) -> Verdict:
        """See `Feed.verdict`."""
        now = self.clock()
        if self._num_finished < self.question.keep and now >= self._look_at:
            self._num_finished = self.claims.finished()
            self._look_at = now + POLL_S
        if self._num_finished < self.question.keep:
            return Verdict.GO_ON
        return Verdict.ABORT if self._open else Verdict.END

    def give_back(self) -> None:
        """The engine is lost: groups that are not whole are for others, and what was here of them is forgotten."""
        lost = [[at for at in unit.groups if at in self._open] for unit in self._units]
        groups = self.question.groups
        self.claims.give_back([Unit(tuple(unit), sum(groups[at].tokens for at in unit)) for unit in lost if unit])
        self._open.clear()

    def answers(self) -> Answers:
        """Rows of whole groups, and of groups that were stopped as far as they came; each once, in no order."""
        rows = Answers.of(Rollout.concat([Rollout.empty(), *self._ended]))
        groups = [self._group_of[sample_id] for sample_id in rows.sample_ids.tolist()]
        mine = torch.tensor([at in self.place or at in self._open for at in groups], dtype=torch.bool)
        return rows.select(mine.nonzero().flatten())

    def padding_waste(self) -> float:
        """Share of the tokens of slots that no row had: in a batch each has a slot as long as the longest row.

        0 where rows come and go as they end.
        """
        if not self.in_batches:
            return 0.0
        rows = Rollout.concat([Rollout.empty(), *self._ended])
        responses, prompts = _lengths(Answers.of(rows)), rows.prompts.tokens.lengths.tolist()
        prompt = dict(zip(responses, prompts, strict=True))
        used = padded = 0
        for unit in self._units:
            ids = [i for at in unit.groups for i in self.question.sample_ids(at) if i in responses]
            used += sum(prompt[i] + responses[i] for i in ids)
            longest = max((prompt[i] for i in ids), default=0) + max((responses[i] for i in ids), default=0)
            padded += len(ids) * longest
        return 1.0 - used / padded if padded else 0.0
