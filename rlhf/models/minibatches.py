"""The optimizer steps of one update: minibatches of a dealt batch, over some epochs."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch

from rlhf.data.batch import PolicyRows, ValueRows
from rlhf.dist.agree import sum_of
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.train_step import LossFn, StepReport, train_step
from rlhf.metrics.timers import Kind

RowsT = TypeVar("RowsT", PolicyRows, ValueRows)

LossMaker = Callable[[float], LossFn[RowsT]]
"""From the tokens that count in a minibatch, over all dp ranks, to its loss, which names its own value `loss`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a batch that was dealt to dp ranks is cut into optimizer steps; the same on every rank."""

    num_rows: int
    """Rows of the batch over all dp ranks."""
    minibatch_rows: int
    """Rows of one optimizer step over all dp ranks."""
    epochs: int
    seed: int
    """Draws the order of the minibatches in each epoch."""

    def order(self) -> tuple[int, ...]:
        """Numbers of the minibatches in the order of their steps."""
        draw, number = Random(self.seed), -(-self.num_rows // self.minibatch_rows)
        return tuple(m for _ in range(self.epochs) for m in draw.sample(range(number), number))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What an update did, over its optimizer steps; the same on every rank of the role."""

    sums: dict[str, float]
    """Totals of the losses' sums over all steps."""
    loss: float
    """Mean over steps, like the next two."""
    grad_norm: float
    """Before clipping; steps that were skipped are left out."""
    clip_factor: float
    lr: float
    """Of the last step."""
    optimizer_steps: int
    skipped_steps: int
    """Steps whose gradient was not finite, or in which no token counted: they changed nothing."""

    @staticmethod
    def of(reports: list[StepReport]) -> "UpdateReport":
        """Report of at least one step."""
        taken = [r for r in reports if not r.skipped]
        names = sorted(reports[0].stats)
        return UpdateReport(
            sums={name: sum(r.stats[name] for r in reports) for name in names},
            loss=sum(r.stats["loss"] for r in reports) / len(reports),
            grad_norm=sum(r.grad_norm for r in taken) / max(1, len(taken)),
            clip_factor=sum(r.clip_factor for r in taken) / max(1, len(taken)),
            lr=reports[-1].lr,
            optimizer_steps=len(reports),
            skipped_steps=len(reports) - len(taken),
        )

    def per(self, total: str, count: str) -> float:
        """A sum divided by another, 0 where that is 0."""
        return self.sums[total] / self.sums[count] if self.sums[count] else 0.0


def run_minibatches(
    model: MegatronModel,
    optimizer: Optimizer,
    rows: RowsT,
    make_loss: LossMaker[RowsT],
    *,
    cut: Cut,
    microbatch_tokens: int,
    temperature: float,
    on_progress: Callable[[int, int], None],
) -> UpdateReport:
    """Train on the rows that were dealt to this dp rank. Collective over the model's pool.

    A minibatch's rows do not depend on the layout: they are those at positions m * minibatch_rows and on of the deal.
    `on_progress` hears (steps done, steps in all) after each optimizer step.
    """
    dp = model.groups.grid.size("dp")
    number = (model.groups.dp_rank + dp * torch.arange(len(rows))) // cut.minibatch_rows
    cpu_dp, reports = model.groups.cpu_dp, []
    assert cpu_dp is not None, "only ranks of the pool train"
    order = cut.order()
    for m in order:
        part = rows.select(torch.nonzero(number == m).flatten())
        with model.span("count tokens", Kind.WAIT):
            counted = sum_of(float(part.loss_mask.values.sum()), cpu_dp)
        reports.append(
            train_step(
                model,
                optimizer,
                part,
                make_loss(max(1.0, counted)),  # nothing counts when every row was dropped: no loss, no 0 / 0
                microbatch_tokens=microbatch_tokens,
                temperature=temperature,
                counts=counted > 0,
            )
        )
        on_progress(len(reports), len(order))
    return UpdateReport.of(reports)
