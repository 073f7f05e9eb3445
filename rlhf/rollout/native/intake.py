"""What the leader's feed says, on every rank of a native engine: one short broadcast a step."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batch import FinishReason
from rlhf.errors import EngineError
from rlhf.rollout.engine import ProgressFn
from rlhf.rollout.feed import Feed, Verdict
from rlhf.rollout.ledger import Ledger, OwedRow
from rlhf.rollout.native.peers import Peers
from rlhf.rollout.native.scheduler import Row

POLL_S = 0.003
"""How often a feed is asked that has nothing while nothing runs."""
SILENCE_S = 1.0
"""The other ranks hear from an idle leader at least so often: their waits have a limit."""
_FAILED = -1
"""In place of a verdict."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What to do before the next step."""

    verdict: Verdict
    rows: list[Row]
    """New ones."""


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A row that left, with its new tokens on the CPU."""

    number: int
    tokens: Tensor
    logprobs: Tensor
    reason: FinishReason
    cached_tokens: int
    """Of its prompt, that were not computed for it."""


class Intake:
    """Between a feed and the decoder; on ranks that do not lead, feed and ledger are None."""

    def __init__(self, peers: Peers, feed: Feed | None, ledger: Ledger | None, on_progress: ProgressFn | None) -> None:
        self._peers, self._on_progress = peers, on_progress
        self._leads = None if feed is None or ledger is None else (feed, ledger)
        assert peers.is_leader == (self._leads is not None), "the leader has a feed, the others have none"

    def began(self, numbers: list[int]) -> None:
        """Rows are worked on from now on. Not collective."""
        if self._leads is not None:
            self._leads[1].began(numbers)

    def have_first_token(self, numbers: list[int]) -> None:
        """Rows have their first new token. Not collective."""
        if self._leads is not None:
            self._leads[1].have_first_token(numbers)

    def next(self, ended: list[EndedRow], *, room: int, new_tokens: int, is_idle: bool) -> Orders:
        """Hand back rows that left and take new ones. Collective over the engine; equal on all its ranks.

        Args:
            ended: Rows that left since the last call; read on the leader.
            room: How many rows are wanted beyond those that wait.
            new_tokens: Tokens sampled so far of the rows that run.
            is_idle: Nothing runs or waits: there is time.

        Raises:
            EngineError: The feed or one of its rows failed, on ranks that do not lead; the leader gets what was raised.
        """
        if self._leads is None:
            orders, counts = self._hear()
        else:
            try:
                orders = self._ask(*self._leads, ended, room=room, new_tokens=new_tokens, is_idle=is_idle)
            except Exception as error:
                self._fail(error)
                raise
            counts = self._leads[1].num_finished, self._leads[1].num_taken
            self._share(orders.verdict, orders.rows, counts)
        if self._on_progress is not None:
            self._on_progress(*counts)
        return orders

    def abort(self, ended: list[EndedRow]) -> None:
        """Hand back what ran when the feed said ABORT, and all that waits. Collective over the engine.

        Raises:
            EngineError: As `next`.
        """
        if self._leads is None:
            self._hear()
            return
        feed, ledger = self._leads
        try:
            _end(ledger, ended)
            for owed in ledger.owed():
                ledger.end(owed.number, torch.empty(0, dtype=torch.int64), torch.empty(0), FinishReason.ABORT)
            _hand_back(feed, ledger)
        except Exception as error:
            self._fail(error)
            raise
        self._share(Verdict.ABORT, [], (ledger.num_finished, ledger.num_taken))

    def _ask(
        self, feed: Feed, ledger: Ledger, ended: list[EndedRow], *, room: int, new_tokens: int, is_idle: bool
    ) -> Orders:
        """What the feed says; with time on our hands, once it says something."""
        _end(ledger, ended)
        until = time.monotonic() + SILENCE_S
        while True:
            _hand_back(feed, ledger)
            verdict, rows = feed.verdict(), list[Row]()
            while verdict == Verdict.GO_ON and len(rows) < room:
                work = feed.take(ledger.load(new_tokens=new_tokens))
                if work is None:
                    break
                rows += [_row(owed) for owed in ledger.take(work)]
            if rows or not is_idle or verdict != Verdict.GO_ON or time.monotonic() > until:
                return Orders(verdict, rows)
            time.sleep(POLL_S)

    def _fail(self, error: Exception) -> None:
        """On the leader: the run ends here, on all ranks."""
        assert self._leads is not None, "the leader has a feed"
        self._leads[1].give_up()
        self._share(_FAILED, [], (0, 0), why=str(error) or type(error).__name__)

    def _share(self, verdict: int, rows: list[Row], counts: tuple[int, int], *, why: str = "") -> None:
        """To the other ranks: a head of fixed size, and what it announces."""
        if self._peers.size == 1:
            return
        text = list(why.encode())
        columns = [
            [row.index for row in rows],
            [row.seed for row in rows],
            [len(row.prompt) for row in rows],
            [len(row.begun) for row in rows],
            [token for row in rows for token in (*row.prompt, *row.begun)],
            text,
        ]
        body = torch.tensor([number for column in columns for number in column], dtype=torch.int64)
        self._peers.share(torch.tensor([verdict, *counts, len(rows), len(text), body.numel()]))
        if body.numel():
            self._peers.share(body)

    def _hear(self) -> tuple[Orders, tuple[int, int]]:
        verdict, finished, taken, count, text, size = self._peers.share(torch.zeros(6, dtype=torch.int64)).tolist()
        body = self._peers.share(torch.zeros(size, dtype=torch.int64)) if size else torch.zeros(0, dtype=torch.int64)
        if verdict == _FAILED:
            raise EngineError(f"native engine: on the leader: {bytes(body[size - text :].tolist()).decode()}")
        indices, seeds, prompts, begun, tokens = body.split([count] * 4 + [size - text - 4 * count])
        lengths = torch.stack([prompts, begun], 1).flatten().tolist()
        parts = [tuple(part.tolist()) for part in tokens.split(lengths)]
        rows = [
            Row(index, parts[2 * at], seed, parts[2 * at + 1])
            for at, (index, seed) in enumerate(zip(indices.tolist(), seeds.tolist(), strict=True))
        ]
        return Orders(Verdict(verdict), rows), (finished, taken)


def _row(owed: OwedRow) -> Row:
    begun = () if owed.begun is None else tuple(owed.begun.tokens.tolist())
    return Row(owed.number, tuple(owed.prompt.tolist()), owed.seed, begun)


def _end(ledger: Ledger, ended: list[EndedRow]) -> None:
    for row in ended:
        ledger.end(row.number, row.tokens, row.logprobs, row.reason, cached_tokens=row.cached_tokens)


def _hand_back(feed: Feed, ledger: Ledger) -> None:
    finished = ledger.finished()
    if finished is not None:
        feed.done(finished)
