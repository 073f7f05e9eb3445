"""One optimizer step of one model: microbatches, summed gradients, clipping, update, statistics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.data.batch import Sequences
from rlhf.families.spec import Head
from rlhf.mcore.model import MegatronModel, head_weight
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.outputs import PolicyOutputs, ValueOutputs, policy_outputs, value_outputs
from rlhf.mcore.schedule import run_schedule
from rlhf.mcore.score import pack_microbatches
from rlhf.metrics.timers import Kind


class Rows(Protocol):
    """A batch to train on: a Table with the sequences and what the loss needs, aligned with the responses."""

    @property
    def sequences(self) -> Sequences:
        """Prompt and response of each row."""

    def select(self, index: Tensor) -> Self:
        """Rows in the order of index."""

    def to(self, device: torch.device) -> Self:
        """Tensors on a device."""


RowsT = TypeVar("RowsT", bound=Rows)

Outputs = PolicyOutputs | ValueOutputs
LossFn = Callable[[Any, RowsT], tuple[Tensor, dict[str, Tensor]]]
"""Loss of a microbatch: of the model's outputs (PolicyOutputs or ValueOutputs, as its head gives) and the rows (zero
rows too). It is already divided by the denominator of the whole minibatch over all dp ranks, since gradients are plain
sums. With it come named sums for the log, 0-d, always the same names."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did; the same on every rank of the pool."""

    stats: dict[str, float]
    """The loss function's sums, over all microbatches and dp ranks."""
    grad_norm: float
    """Before clipping."""
    clip_factor: float
    """What the gradients were multiplied by; 1 when not clipped."""
    lr: float
    skipped: bool
    """The gradient was not finite, or no token counted: weights, moments and schedule are as before."""


def train_step(
    model: MegatronModel,
    optimizer: Optimizer,
    rows: RowsT,
    loss: LossFn[RowsT],
    *,
    microbatch_tokens: int,
    temperature: float = 1.0,
    counts: bool = True,
) -> StepReport:
    """Update the model once from a minibatch; how it is cut into dp ranks and microbatches does not matter.

    Collective over the model's pool: each rank brings the rows of its dp coordinate (none is fine), the same on tp and
    pp peers. `temperature` is that of a policy's log-probs. `counts`, the same on all ranks: whether any token of the
    minibatch counts in the loss, on whichever dp rank; if none does, only the sums are taken and the step is skipped.

    Raises:
        ShapeError: A row without a prompt, or a token outside the vocabulary.
    """
    plan, packed = pack_microbatches(model, rows.sequences, microbatch_tokens)
    indices = [torch.tensor(part, dtype=torch.int64) for part in plan if model.groups.is_last_stage]
    parts = [rows.select(index).to(model.device) for index in indices]

    def finish(hidden: Tensor, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        if model.head is Head.VALUE:
            outputs: Outputs = value_outputs(model, hidden)
        else:
            outputs = policy_outputs(model, hidden, packed[number].targets, temperature=temperature)
        value, sums = loss(outputs, parts[number])
        if not len(hidden):
            # Of nothing: ties a dummy's loss to the model, or pp peers wait for a gradient and dp peers for the head's.
            value = value + hidden.sum() + head_weight(model)[:0].sum()
        return value, {name: total.detach() for name, total in sums.items()}

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    found = run_schedule(model, packed, finish, forward_only=False)
    with model.span("sum statistics", Kind.WAIT):
        stats = _sum_stats(model, found)
    with model.span("optimizer"):
        step = optimizer.step() if counts else optimizer.skip()
    return StepReport(stats, step.grad_norm, step.clip_factor, step.lr, step.skipped)


def _sum_stats(model: MegatronModel, found: list[dict[str, Tensor]]) -> dict[str, float]:
    """Sums over microbatches and dp on the last stage, then told to the other stages. Collective over the pool."""
    groups = model.groups
    stats: dict[str, float] = {}
    if groups.is_last_stage:
        names = sorted(found[0])
        sums = torch.stack([torch.stack([part[name].double() for name in names]) for part in found]).sum(0).cpu()
        dist.all_reduce(sums, group=groups.cpu_dp)
        stats = dict(zip(names, sums.tolist(), strict=True))
    if model.parallel.pp > 1:
        box = [stats]
        dist.broadcast_object_list(box, group=groups.cpu_pp, group_src=model.parallel.pp - 1)
        stats = box[0]
    return stats
