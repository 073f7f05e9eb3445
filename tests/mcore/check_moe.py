"""Models with experts say what transformers says, in layouts that cut experts along and across tensor parallelism."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import build_model, head_weight
from rlhf.mcore.vocab_parallel import vocab_parallel_logprobs
from tests.mcore.check_logits import CPU, assert_close, forward, logits_of
from tests.mcore.tiny import MOE_CASES, pack, sequences

if TYPE_CHECKING:
    import transformers

LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tp=2, ep=2, first_rank=1),
    ParallelConfig(dp=4, ep=2, etp=2),
    ParallelConfig(dp=4, etp=4),
    ParallelConfig(pp=2, dp=2, ep=2),
    ParallelConfig(pp=2, dp=2, ep=2, layers_per_stage=(1, 2)),
    ParallelConfig(tp=2, pp=2),
    ParallelConfig(tp=2, pp=2, etp=2, layers_per_stage=(2, 1)),
    ParallelConfig(tp=2, dp=2, ep=4),
    ParallelConfig(tp=2, dp=2, ep=2, etp=2),
    ParallelConfig(pp=3, layers_per_stage=(1, 1, 1), first_rank=1),
]


def rows_of(dp_rank: int, vocab_size: int) -> list[int]:
    """Which sequences a replica takes: other ones on each, in number too, so that tokens of several ranks meet."""
    return [(number * 2 + dp_rank) % 5 for number in range(2 + dp_rank)]


def check_all_moe(root: Path, factory: GroupFactory) -> None:
    for parallel in LAYOUTS:
        groups = make_groups(parallel, factory)
        if not groups.is_member:
            continue
        for case in MOE_CASES:
            num_layers = read_spec(root / case).num_layers
            if num_layers == sum(parallel.layers_per_stage or (num_layers // parallel.pp,) * parallel.pp):
                check_logits(root, case, parallel, groups)


def check_logits(root: Path, case: str, parallel: ParallelConfig, groups: ModelGroups) -> None:
    """Against NAME.logits.pt, a list of one [T, vocabulary] a sequence, beside the checkpoint folders."""
    what = f"{case} {parallel}"
    spec = read_spec(root / case)
    config = ModelConfig(path="by-hand")
    model = build_model(spec, config, parallel, groups, head=Head.LM, device=CPU, seed=1, trainable=False)
    load_weights(model, root / case)
    rows = rows_of(groups.dp_rank, spec.vocab_size)
    all_rows = sequences(spec.vocab_size)
    packed = pack([all_rows[row] for row in rows], multiple_of=parallel.tp)
    with torch.no_grad():
        hidden = forward(model, packed)
        if not groups.is_last_stage:
            return
        hidden = hidden[: packed.num_real, 0]
        logits, targets = logits_of(model, hidden), torch.arange(packed.num_real) * 5 % spec.vocab_size
        logprobs, _ = vocab_parallel_logprobs(
            hidden,
            head_weight(model),
            targets,
            tp_group=groups.collection.tp,
            vocab_size=spec.vocab_size,
            temperature=1.0,
            chunk_tokens=11,
        )
    saved = torch.load(root / f"{case}.logits.pt")
    expected = torch.cat([saved[row] for row in rows])
    expected_logprobs = expected.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    # As for dense models: fp32 with other orders of summation. A token near a tie between experts would show as a
    # difference of whole units; the cases have none.
    assert_close(logits, expected, f"logits of {what}")
    assert_close(logprobs, expected_logprobs, f"log-probs of {what}")


def expected_logits(model: "transformers.PreTrainedModel") -> list[torch.Tensor]:
    """By transformers, one sequence at a time; float32 [T, vocabulary] each."""
    with torch.no_grad():
        return [model(row[None]).logits[0] for row in sequences(model.config.vocab_size)]
