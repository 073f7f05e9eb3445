"""A language model in its role: log-probs of responses, and updates when it is the actor."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from rlhf.data.batch import PolicyRows, Sequences, TokenScores
from rlhf.data.ragged import Ragged
from rlhf.mcore.groups import ModelGroups
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.readings import Reading, score_readings
from rlhf.mcore.score import score_logprobs
from rlhf.models.calls import Deal, PendingAnswer, PendingRows, RoleCalls
from rlhf.models.minibatches import Cut, LossMaker, UpdateReport, run_minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Actor or reference. Its methods are called on every rank of the job, in the same order."""

    name: str
    groups: ModelGroups
    model: MegatronModel | None
    """None on ranks outside the pool."""
    optimizer: Optimizer | None
    """None for a frozen policy, and outside the pool."""
    calls: RoleCalls
    temperature: float
    """Of the sampling distribution: log-probs are those of softmax(logits / temperature)."""
    microbatch_tokens: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a named block on this rank."""
    tick: Callable[[str], None]
    """Tells the watchdog that this rank moves on, and with what."""

    def logprobs(self, sequences: Sequences, *, owners: tuple[int, ...]) -> PendingRows[TokenScores]:
        """Log-probs of the responses; `collect` gives each owner those of its rows.

        `owners[i]` is the rank that holds row i of the global batch; each rank brings its own rows in ascending i.
        """
        deal = Deal(tuple(range(len(owners))), self.groups.grid)
        return self.calls.dispatch_rows(
            deal, self._logprobs, sequences, owners=owners, result=TokenScores, name=self.name
        )

    def readings(
        self, sequences: Sequences, *, readings: Sequence[Reading], owners: tuple[int, ...]
    ) -> PendingRows[TokenScores]:
        """Log-probs of the responses under each reading, each row in a forward pass of its own; for a few rows.

        A row of the result has `len(readings)` times as many numbers as its response has tokens, reading after reading.
        `readings` are the same on all ranks; `owners` as in `logprobs`.
        """
        deal = Deal(tuple(range(len(owners))), self.groups.grid)

        def run(rows: Sequences) -> TokenScores:
            assert self.model is not None, f"{self.name} has no model on this rank"
            with self.phase(f"score/{self.name}"):
                columns = score_readings(self.model, rows, readings, microbatch_tokens=1)
            if columns is None:
                return TokenScores.empty()
            found = [torch.cat(of_row) for of_row in zip(*(column.rows() for column in columns), strict=True)]
            return TokenScores(Ragged.of(found, dtype=torch.float32))

        return self.calls.dispatch_rows(deal, run, sequences, owners=owners, result=TokenScores, name=self.name)

    def update(
        self,
        rows: PolicyRows,
        make_loss: LossMaker[PolicyRows],
        *,
        order: tuple[int, ...],
        cut: Cut,
        owners: tuple[int, ...],
    ) -> PendingAnswer[UpdateReport]:
        """Train on a global batch whose rows are taken in the given order; the report is known on the pool's ranks."""

        def run(dealt: PolicyRows) -> UpdateReport:
            assert self.model is not None, f"{self.name} has no model on this rank"
            assert self.optimizer is not None, f"{self.name} is frozen"
            with self.phase(f"update/{self.name}"):
                return run_minibatches(
                    self.model,
                    self.optimizer,
                    dealt,
                    make_loss,
                    cut=cut,
                    microbatch_tokens=self.microbatch_tokens,
                    temperature=self.temperature,
                    on_progress=lambda done, total: self.tick(f"update/{self.name} {done}/{total}"),
                )

        return self.calls.dispatch(Deal(order, self.groups.grid), run, rows, owners=owners, name=self.name)

    def _logprobs(self, rows: Sequences) -> TokenScores:
        assert self.model is not None, f"{self.name} has no model on this rank"
        with self.phase(f"score/{self.name}"):
            scored = score_logprobs(
                self.model,
                rows,
                microbatch_tokens=self.microbatch_tokens,
                temperature=self.temperature,
                with_entropy=False,
            )
        return TokenScores.empty() if scored is None else TokenScores(scored[0])
