"""Microbatches through Megatron's pipeline schedules: the one place that calls them, for training and for scoring."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor

from rlhf.mcore.interleaved_p2p import InterleavedP2P
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.packing import PackedMicrobatch

Result = TypeVar("Result")


def run_schedule(
    model: MegatronModel,
    microbatches: Sequence[PackedMicrobatch],
    finish: Callable[[Tensor, int], tuple[Tensor, Result]],
    *,
    forward_only: bool,
) -> list[Result]:
    """Results of `finish` for each microbatch, in order; empty on ranks outside the last pipeline stage.

    Collective over the model's pool: every rank calls it with the same number of microbatches, tp and pp peers with
    the same ones. With backward passes, the gradient buffers then hold the plain sum of the losses' gradients over
    microbatches and dp ranks, whatever Megatron would divide by (each dp rank's part of the sum, as the distributed
    optimizer wants it).

    Args:
        model: Trained models come with their gradient buffers zeroed.
        microbatches: At least one, and a multiple of `parallel.microbatch_multiple`.
        finish: Called on the last stage with the hidden states that predict the responses, [R, H], and the
            microbatch's number; gives a scalar loss (which must depend on its argument even when R = 0, unless
            forward_only) and a result to keep.
        forward_only: No gradients and no stored activations.
    """
    assert model.groups.collection is not None, "run_schedule is for ranks of the model's pool"
    multiple = model.parallel.microbatch_multiple
    assert len(microbatches) % multiple == 0, (
        f"run_schedule: {len(microbatches)} microbatches, not {multiple} at a time"
    )

    def step(numbered: Iterator[tuple[int, PackedMicrobatch]], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
        number, packed = next(numbered)
        output = chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)

        def loss(output_n1H: Tensor) -> tuple[Tensor, Tensor, Result]:
            value, result = finish(output_n1H.squeeze(1).index_select(0, packed.predict_index), number)
            # calculate_per_token_loss: of three values the first is divided by nothing, and zero tokens divide nothing.
            return value, torch.zeros((), dtype=torch.int, device=value.device), result

        return output, loss

    tokens = [packed.tokens.numel() for packed in microbatches]
    inputs = [iter(enumerate(microbatches)) for _ in model.chunks]  # each chunk takes them in the same order
    is_interleaved = model.parallel.vpp > 1
    arguments = dict(
        forward_step_func=step,
        data_iterator=inputs if is_interleaved else inputs[0],
        model=list(model.chunks) if is_interleaved else model.chunks[0],
        num_microbatches=len(microbatches),
        seq_length=max(tokens),  # of no effect: each microbatch travels at its own length
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=model.groups.collection,
    )
    with torch.set_grad_enabled(not forward_only):
        if model.parallel.pp == 1:
            return forward_backward_no_pipelining(**arguments)
        if not is_interleaved:
            communicator = P2PCommunicator(model.groups.collection.pp, model.config)
            return forward_backward_pipelining_without_interleaving(p2p_communicator=communicator, **arguments)
        interleaved = InterleavedP2P(model, [number // model.parallel.tp for number in tokens])
        results = forward_backward_pipelining_with_interleaving(p2p_communicator=interleaved, **arguments)
        interleaved.check_done(forward_only=forward_only)
        return results
