"""Logits of whole rows, for comparing a model with another one; training and scoring never make them."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.data.batch import Sequences
from rlhf.data.ragged import Ragged
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, LogicalTensor, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import take_weights
from rlhf.mcore.model import build_model, head_weight
from rlhf.mcore.packing import pack
from rlhf.reshard.layout import Box


def logits_on_first_rank(
    spec: ModelSpec,
    slice_of: Callable[[LogicalTensor, Box], Tensor],
    rows: Sequence[Tensor],
    *,
    where: str,
    timeout: timedelta,
) -> list[Tensor] | None:
    """Logits of a language model that is built on the CPU of the job's first rank, and given up afterwards.

    Collective over the job, which makes the model's groups; only its first rank then works, the others get None.

    Args:
        spec: The model.
        slice_of: Gives the elements of a tensor's box, in any dtype; they are cast to float32.
        rows: Token ids, int64 [T] each, T >= 2.
        where: Where the weights come from, in a message.
        timeout: Of the groups.

    Returns:
        float32 [T - 1, vocabulary] for each row: of what follows each token but the last.
    """
    alone, cpu = ParallelConfig(), torch.device("cpu")
    groups = make_groups(alone, GroupFactory(device_backend="gloo", timeout=timeout))
    if not groups.is_member:
        return None
    config = ModelConfig(path=where, dtype="float32")
    model = build_model(spec, config, alone, groups, head=Head.LM, device=cpu, seed=0, trainable=False)
    names = {tensor.name for tensor in logical_tensors(spec, head=Head.LM)}
    take_weights(model, slice_of, names=names, where=where)
    found = []
    with torch.no_grad():
        for row in rows:
            count = torch.tensor([len(row) - 1])
            one = Sequences(torch.zeros(1, dtype=torch.int64), Ragged(row, torch.tensor([len(row)])), count)
            packed = pack(one, multiple_of=1, device=cpu)
            hidden = model.chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)[:, 0]
            logits = hidden[packed.predict_index] @ head_weight(model).T
            found.append(logits[:, : spec.vocab_size])
    return found
