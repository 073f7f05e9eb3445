"""Role calls: dispatch rows to a role's ranks, compute there, collect the results at the rows' owners.

Program order is communication order. A dispatch posts the rows and returns at once. The first collect on a rank runs,
in order of dispatch, every computation this rank takes part in; so roles on disjoint pools work at the same time, and
roles on the same ranks one after the other, whatever the order in which the program dispatches and collects.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from rlhf.data.exchange import Exchange, Message, RowPlan
from rlhf.data.table import Table
from rlhf.dist.grid import Grid
from rlhf.metrics.timers import Kind, SpanFn, no_span

RowsT = TypeVar("RowsT", bound=Table)
ResultT = TypeVar("ResultT", bound=Table)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Deal:
    """How the rows of a global batch fall to a role's data-parallel ranks: row order[j] goes to dp rank j % dp.

    `order` is the same on every rank of the job. An optimizer step that takes rows order[a:b] is so split evenly,
    and which rows it takes does not depend on the layout.
    """

    order: tuple[int, ...]
    grid: Grid

    def positions(self, dp_rank: int) -> range:
        """Positions of the order that fall to a data-parallel rank, ascending."""
        return range(dp_rank, len(self.order), self.grid.size("dp"))

    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each position: the ranks that compute on its row (all tp and pp peers of one dp rank)."""
        peers = {self.grid.coords(group[0])["dp"]: group for group in self.grid.groups("tp", "pp")}
        return tuple(peers[j % self.grid.size("dp")] for j in range(len(self.order)))

    def answering_ranks(self) -> tuple[int, ...]:
        """For each position: the rank that sends the result of its row, tp 0 of the last pipeline stage."""
        last = self.grid.size("pp") - 1
        return tuple(self.grid.rank(pp=last, dp=j % self.grid.size("dp")) for j in range(len(self.order)))


class PendingRows(Generic[ResultT]):
    """The result of a call that answers with a row per row; `collect` gives them to the rows' owners."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._collect: Callable[[], ResultT] | None = None

    def answered(self, collect: Callable[[], ResultT]) -> None:
        """Called once by the queue, when the results are on their way."""
        self._collect = collect

    def collect(self) -> ResultT:
        """Results of the rows that this rank owns, in its order of rows; none on a rank that owns none."""
        self._drain()
        assert self._collect is not None, "drain runs every dispatched call"
        return self._collect()


class PendingAnswer(Generic[AnswerT]):
    """The result of a call that answers with one value, on the role's own ranks only."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._answer: AnswerT | None = None

    def answered(self, answer: AnswerT) -> None:
        """Called once by the queue, on the role's ranks."""
        self._answer = answer

    def collect(self) -> AnswerT | None:
        """The answer on the role's ranks, None elsewhere."""
        self._drain()
        return self._answer


class RoleCalls:
    """The queue of role calls of one rank. Every rank of the job makes the same calls in the same order."""

    def __init__(self, rank: int, group: ProcessGroup, *, span: SpanFn = no_span) -> None:
        """`group`: gloo, over all ranks of the job. `span`: names the waits for rows, for timelines."""
        self._rank, self._group, self._span = rank, group, span
        self._queue: deque[Callable[[], None]] = deque()
        self._in_flight: list[Message] = []
        self._next_tag = 0

    def dispatch_rows(
        self,
        deal: Deal,
        compute: Callable[[RowsT], ResultT],
        rows: RowsT,
        *,
        owners: tuple[int, ...],
        result: type[ResultT],
        name: str = "role",
    ) -> PendingRows[ResultT]:
        """Post this rank's rows and queue the computation; results go back to the owners.

        `compute` runs on each of the role's ranks with the rows of its dp rank, in the order of the deal (maybe none),
        and returns a row for each on the answering rank; what it returns elsewhere is ignored. `owners[i]` is the rank
        that holds row i of the global batch; every rank's `rows` are its own, in ascending i. `name` is the role's, for
        timelines.
        """
        pending: PendingRows[ResultT] = PendingRows(self._drain)
        arriving, tag = self._post(deal, rows, owners, name), self._tag()
        home = RowPlan(deal.answering_ranks(), tuple((owners[row],) for row in deal.order))

        def run() -> None:
            mine = self._receive(arriving, f"rows for {name}")
            answer = result.empty()
            if self._rank in deal.grid.ranks:
                computed = compute(mine)
                answer = computed if home.held(self._rank) else answer
            with self._span(f"send results of {name}"):
                back = Exchange(answer, home, group=self._group, tag=tag)
            self._in_flight.extend(back.sent)
            order = torch.tensor([deal.order[j] for j in home.wanted(self._rank)], dtype=torch.int64)
            pending.answered(lambda: self._receive(back, f"results of {name}").select(order.argsort()))

        self._queue.append(run)
        return pending

    def dispatch(
        self,
        deal: Deal,
        compute: Callable[[RowsT], AnswerT],
        rows: RowsT,
        *,
        owners: tuple[int, ...],
        name: str = "role",
    ) -> PendingAnswer[AnswerT]:
        """Like dispatch_rows, for a computation whose result stays on the role's ranks, such as an update."""
        pending: PendingAnswer[AnswerT] = PendingAnswer(self._drain)
        arriving = self._post(deal, rows, owners, name)

        def run() -> None:
            mine = self._receive(arriving, f"rows for {name}")
            if self._rank in deal.grid.ranks:
                pending.answered(compute(mine))

        self._queue.append(run)
        return pending

    def flush(self) -> None:
        """Run what is queued and wait until all that this rank sent has left; once at the end of a step.

        Until then the queue keeps the buffers alive: a send whose buffer is freed never arrives.
        """
        self._drain()
        with self._span("rows to leave", Kind.WAIT):
            for message in self._in_flight:
                message.wait()
        self._in_flight.clear()

    def _post(self, deal: Deal, rows: RowsT, owners: tuple[int, ...], name: str) -> Exchange[RowsT]:
        """Send this rank's rows to the role's ranks."""
        plan = RowPlan(tuple(owners[row] for row in deal.order), deal.targets())
        index = {row: at for at, row in enumerate(i for i, owner in enumerate(owners) if owner == self._rank)}
        dealt = [index[deal.order[j]] for j in plan.held(self._rank)]
        with self._span(f"send rows to {name}"):
            exchange = Exchange(
                rows.select(torch.tensor(dealt, dtype=torch.int64)), plan, group=self._group, tag=self._tag()
            )
        self._in_flight.extend(exchange.sent)
        return exchange

    def _receive(self, exchange: Exchange[RowsT], what: str) -> RowsT:
        with self._span(what, Kind.WAIT):
            return exchange.receive()

    def _drain(self) -> None:
        """Run every queued computation, oldest first."""
        while self._queue:
            self._queue.popleft()()

    def _tag(self) -> int:
        self._next_tag += 2
        return self._next_tag
