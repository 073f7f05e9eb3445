"""Log-probs of given responses under other readings of the same logits: temperatures, cuts that renormalise.

For looking closely at a few rows: whole logits of a chunk of tokens exist on each rank. Shape letters: R = response
tokens, C = tokens of a chunk, V = vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.data.batch import Sequences
from rlhf.data.ragged import Ragged
from rlhf.mcore.model import MegatronModel, head_weight
from rlhf.mcore.score import score_columns
from rlhf.mcore.vocab_parallel import chunk_tokens_for


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """A distribution made of logits: divided by the temperature, then cut by top-k, top-p and min-p, in this order.

    What is left by a cut is renormalised; a token that the cut throws out keeps the log-prob from before it.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether it renormalises."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    def __str__(self) -> str:
        found = [f"temperature {self.temperature:.4g}"]
        found += [f"top_p {self.top_p:.4g}"] if self.top_p < 1.0 else []
        found += [f"top_k {self.top_k}"] if self.top_k else []
        found += [f"min_p {self.min_p:.4g}"] if self.min_p else []
        return ", ".join(found) + (", renormalised" if self.is_cut else "")


def score_readings(
    model: MegatronModel, sequences: Sequences, readings: Sequence[Reading], *, microbatch_tokens: int
) -> list[Ragged] | None:
    """Log-probs of the responses under each reading (at least one).

    Collective over the model's pool, like `score_logprobs`: last-stage ranks get float32 on the CPU, row for row as
    given, in the order of the readings; the others None.
    """
    order = sorted(readings)

    def finish(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return tuple(_columns(model, hidden, targets, order).unbind(1))

    columns = score_columns(model, sequences, finish, microbatch_tokens)
    return None if columns is None else [columns[order.index(reading)] for reading in readings]


def read_logits(logits_CV: Tensor, targets_C: Tensor, readings: Sequence[Reading]) -> Tensor:
    """Log-probs of the targets under each reading, float32 [C, readings]; readings are sorted."""
    found = []
    for temperature, group in groupby(readings, key=lambda one: one.temperature):
        logp_CV = (logits_CV.float() / temperature).log_softmax(1)
        picked_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
        same = list(group)
        if any(one.is_cut for one in same):
            logp_CV = logp_CV.sort(1, descending=True).values
            mass_CV = logp_CV.double().exp().cumsum_(1)
        found += [_renormalised(logp_CV, mass_CV, picked_C, one) if one.is_cut else picked_C for one in same]
    return torch.stack(found, 1)


def _columns(model: MegatronModel, hidden: Tensor, targets: Tensor, readings: Sequence[Reading]) -> Tensor:
    assert model.groups.collection is not None, "readings are for ranks of the model's pool"
    weight, group = head_weight(model), model.groups.collection.tp
    size = chunk_tokens_for(len(weight) * group.size())
    found = [hidden.new_empty((0, len(readings)), dtype=torch.float32)]
    for at in range(0, len(hidden), size):
        logits = hidden[at : at + size] @ weight.T
        if group.size() > 1:
            shards = [torch.empty_like(logits) for _ in range(group.size())]
            dist.all_gather(shards, logits, group=group)
            logits = torch.cat(shards, 1)
        found.append(read_logits(logits[:, : model.spec.vocab_size], targets[at : at + size], readings))
    return torch.cat(found)


def _renormalised(logp_CV: Tensor, mass_CV: Tensor, picked_C: Tensor, reading: Reading) -> Tensor:
    """`logp_CV` falls along V, `mass_CV` is what its entries hold together up to each."""
    vocab = logp_CV.shape[1]
    top_k = min(reading.top_k or vocab, vocab)
    before_CV = mass_CV - logp_CV.double().exp()
    count_C = (before_CV[:, :top_k] < reading.top_p * mass_CV[:, top_k - 1, None]).sum(1)
    if reading.min_p:
        count_C = torch.minimum(count_C, (logp_CV >= logp_CV[:, :1] + torch.tensor(reading.min_p).log()).sum(1))
    least_C = logp_CV.gather(1, (count_C.clamp(min=1) - 1)[:, None])
    count_C = (logp_CV >= least_C).sum(1)  # ties stay
    mass_C = mass_CV.gather(1, (count_C - 1)[:, None])[:, 0]
    return torch.where(picked_C >= least_C[:, 0], picked_C - mass_C.log().float(), picked_C)
