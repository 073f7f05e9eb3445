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
    expected_tokens: float
    """Length that a response is expected to have."""
    max_new_tokens: int
    """Length that it can have."""

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
            expected_tokens: See above.
            max_new_tokens: See above.
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
            expected_tokens,
            max_new_tokens,
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
    max_tokens: int
    """Nor while those that it has are expected to need so many tokens of keys and values."""
    in_batches: bool
    """A unit is taken only by an engine that has nothing to do."""
    clock: Callable[[], float] = time.monotonic
    place: dict[int, int] = field(default_factory=dict)
    """For each group that became whole here: how many were by then, over all engines; counted from 1."""
    queue_s: list[float] = field(default_factory=list)
    """For each row taken: seconds from the call until then."""
    busy_s: float = 0.0
    """Seconds in which the engine had rows."""
    num_tokens: int = 0
    """Response tokens of all rows that came back."""
    _rows_out: int = 0
    _rows_whole: int = 0
    _busy_from: float = 0.0
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
        if now < self._claim_at or self._is_full(load):
            return None
        unit, rows = self.claims.next(), self._rows_out
        if unit is None:
            self._claim_at = now + POLL_S
            return None
        self._units.append(unit)
        work = self.question.work(unit.groups)
        for at in unit.groups:
            self._open[at] = self.question.groups[at].rows
            self._group_of |= dict.fromkeys(self.question.sample_ids(at), at)
        self.queue_s += [now - self._began_at] * len(work.prompts)
        self._busy_from = self._busy_from if rows else now
        self._rows_out += len(work.prompts)
        return work

    def _is_full(self, load: Load) -> bool:
        """Whether the engine has enough to do; what it cannot begin is better left to others."""
        if self.in_batches:
            return load.rows > 0
        return load.rows >= self.max_rows or (load.rows > 0 and self._expected_kv(load) >= self.max_tokens)

    def _expected_kv(self, load: Load) -> float:
        """Tokens of keys and values that the engine's rows are expected to need by the time they end.

        The mean response is estimated from all tokens that were sampled here, over the number of those that ended: the
        likeliest mean of lengths that are in part unknown yet, if they were exponential. So those that end first, the
        short ones, do not make it too small. What was expected before counts as one response more.
        """
        question = self.question
        so_far = load.rows * question.max_new_tokens - load.outstanding_tokens
        mean = (question.expected_tokens + self.num_tokens + so_far) / (1 + self._rows_whole)
        prompts = sum(len(question.groups[at].prompt) for at in self._open)
        return prompts + load.rows * min(mean, question.max_new_tokens)

    def done(self, finished: Rollout) -> None:
        """See `Feed.done`."""
        self._ended.append(finished)
        self._rows_out -= len(finished)
        self.num_tokens += finished.responses.values.numel()
        if not self._rows_out:
            self.busy_s += self.clock() - self._busy_from
        ids, reasons = finished.prompts.sample_ids.tolist(), finished.finish_reasons.tolist()
        for sample_id, reason in zip(ids, reasons, strict=True):
            at = self._group_of[sample_id]
            self._open[at] -= reason != FinishReason.ABORT
            self._rows_whole += reason != FinishReason.ABORT
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
        self.busy_s += self.clock() - self._busy_from if self._rows_out else 0.0

    @property
    def stopped(self) -> tuple[int, ...]:
        """Groups taken here that are not whole, once the engine has ended."""
        return tuple(self._open)

    def answers(self) -> Answers:
        """Rows of whole groups, and of groups that were stopped as far as they came; each once, in no order."""
        rows = Answers.of(Rollout.concat([Rollout.empty(), *self._ended]))
        groups = [self._group_of[sample_id] for sample_id in rows.sample_ids.tolist()]
        mine = torch.tensor([at in self.place or at in self._open for at in groups], dtype=torch.bool)
        return rows.select(mine.nonzero().flatten())

    def slot_tokens(self) -> tuple[int, int]:
        """Tokens that slots had room for, and those that rows filled.

        In a batch each row has a slot as long as the longest prompt and the longest response of the batch, since its
        slot is not used again before the last row has ended. Where rows come and go, nothing is left over.
        """
        rows = Rollout.concat([Rollout.empty(), *self._ended])
        responses, prompts = _lengths(Answers.of(rows)), rows.prompts.tokens.lengths.tolist()
        prompt = dict(zip(responses, prompts, strict=True))
        used = sum(responses.values()) + sum(prompts)
        if not self.in_batches:
            return used, used
        batches = [
            [i for at in unit.groups for i in self.question.sample_ids(at) if i in prompt] for unit in self._units
        ]
        longest = [max(prompt[i] for i in ids) + max(responses[i] for i in ids) if ids else 0 for ids in batches]
        return sum(len(ids) * tokens for ids, tokens in zip(batches, longest, strict=True)), used
