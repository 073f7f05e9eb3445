"""Log-probs, entropies and values of given responses, without gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.data.batch import Sequences
from rlhf.data.microbatch import Plan, plan_microbatches
from rlhf.data.ragged import Ragged
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.outputs import policy_outputs, value_outputs
from rlhf.mcore.packing import PackedMicrobatch, check_sequences, pack
from rlhf.mcore.schedule import run_schedule
from rlhf.metrics.timers import Kind


def score_logprobs(
    model: MegatronModel, sequences: Sequences, *, microbatch_tokens: int, temperature: float, with_entropy: bool
) -> tuple[Ragged, Ragged | None] | None:
    """Log-probs of the responses under softmax(logits / temperature), and entropies if asked for.

    Collective over the model's pool: each rank brings the rows of its dp coordinate (none is fine), the same on tp and
    pp peers. Last-stage ranks get float32 on the CPU, row for row as given; the others None.

    Raises:
        ShapeError: A row without a prompt, or a token outside the vocabulary.
    """

    def finish(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found = policy_outputs(model, hidden, targets, temperature=temperature, with_entropy=with_entropy)
        return (found.logprobs, found.entropy) if with_entropy else (found.logprobs,)

    scored = score_columns(model, sequences, finish, microbatch_tokens)
    return None if scored is None else (scored[0], scored[1] if with_entropy else None)


def score_values(model: MegatronModel, sequences: Sequences, *, microbatch_tokens: int) -> Ragged | None:
    """Values of the states before each response token; otherwise as `score_logprobs`."""
    scored = score_columns(
        model, sequences, lambda hidden, _: (value_outputs(model, hidden).values,), microbatch_tokens
    )
    return None if scored is None else scored[0]


def score_columns(
    model: MegatronModel,
    sequences: Sequences,
    finish: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    microbatch_tokens: int,
) -> list[Ragged] | None:
    """What `finish` makes of hidden states [R, H] and the response tokens [R] that they predict, [R] each.

    Collective over the model's pool; None outside its last stage.
    """
    plan, packed = pack_microbatches(model, sequences, microbatch_tokens)

    def keep(hidden: Tensor, number: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return hidden.new_zeros(()), finish(hidden, packed[number].targets)

    parts = run_schedule(model, packed, keep, forward_only=True)
    if not model.groups.is_last_stage:
        return None
    order = torch.tensor([row for rows in plan for row in rows], dtype=torch.int64)
    back = torch.argsort(order)
    return [
        Ragged(torch.cat(columns).cpu(), sequences.response_lengths[order]).select(back)
        for columns in zip(*parts, strict=True)
    ]


def pack_microbatches(
    model: MegatronModel, sequences: Sequences, microbatch_tokens: int
) -> tuple[Plan, list[PackedMicrobatch]]:
    """Plan of the rows and each microbatch on the model's device. Collective over dp (the count is agreed)."""
    check_sequences(sequences, vocab_size=model.spec.vocab_size, sliding_window=model.spec.sliding_window)
    with model.span("agree on microbatches", Kind.WAIT):
        plan = plan_microbatches(
            sequences.tokens.lengths.tolist(),
            microbatch_tokens,
            model.groups.cpu_dp,
            multiple_of=model.parallel.microbatch_multiple,
        )
    with model.span("pack"):
        parts = [sequences.select(torch.tensor(rows, dtype=torch.int64)) for rows in plan]
        return plan, [pack(part, multiple_of=model.parallel.tp, device=model.device) for part in parts]
