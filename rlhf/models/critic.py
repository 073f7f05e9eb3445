"""The value model in its role: values of states, and updates."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rlhf.data.batch import Sequences, TokenScores, ValueRows
from rlhf.mcore.groups import ModelGroups
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.score import score_values
from rlhf.models.calls import Deal, PendingAnswer, PendingRows, RoleCalls
from rlhf.models.minibatches import Cut, LossMaker, UpdateReport, run_minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """The critic. Its methods are called on every rank of the job, in the same order."""

    groups: ModelGroups
    model: MegatronModel | None
    """None on ranks outside the pool, like the optimizer."""
    optimizer: Optimizer | None
    calls: RoleCalls
    microbatch_tokens: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a named block on this rank."""
    tick: Callable[[str], None]
    """Tells the watchdog that this rank moves on, and with what."""

    def values(self, sequences: Sequences, *, owners: tuple[int, ...]) -> PendingRows[TokenScores]:
        """Value of the state before each response token; otherwise as Policy.logprobs."""
        deal = Deal(tuple(range(len(owners))), self.groups.grid)
        return self.calls.dispatch_rows(deal, self._values, sequences, owners=owners, result=TokenScores, name="critic")

    def update(
        self,
        rows: ValueRows,
        make_loss: LossMaker[ValueRows],
        *,
        order: tuple[int, ...],
        cut: Cut,
        owners: tuple[int, ...],
    ) -> PendingAnswer[UpdateReport]:
        """As Policy.update."""

        def run(dealt: ValueRows) -> UpdateReport:
            assert self.model is not None, "the critic has no model on this rank"
            assert self.optimizer is not None, "the critic has no optimizer"
            with self.phase("update/critic"):
                return run_minibatches(
                    self.model,
                    self.optimizer,
                    dealt,
                    make_loss,
                    cut=cut,
                    microbatch_tokens=self.microbatch_tokens,
                    temperature=1.0,
                    on_progress=lambda done, total: self.tick(f"update/critic {done}/{total}"),
                )

        return self.calls.dispatch(Deal(order, self.groups.grid), run, rows, owners=owners, name="critic")

    def _values(self, rows: Sequences) -> TokenScores:
        assert self.model is not None, "the critic has no model on this rank"
        with self.phase("score/critic"):
            scored = score_values(self.model, rows, microbatch_tokens=self.microbatch_tokens)
        return TokenScores.empty() if scored is None else TokenScores(scored)
