"""Hidden states times head weight equal transformers' logits in every layout, and so do log-probs without logits."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import ModelGroups, make_groups
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from rlhf.mcore.vocab_parallel import vocab_parallel_logprobs
from tests.mcore.tiny import CASES, Packed, pack, sequences

if TYPE_CHECKING:
    import transformers

CPU = torch.device("cpu")


def forward(model: MegatronModel, packed: Packed) -> torch.Tensor:
    """Last stage's hidden states [T, 1, H] on all stages' ranks' last; passes activations by hand."""
    groups, parallel = model.groups, model.parallel
    pp = groups.collection.pp
    ranks = dist.get_process_group_ranks(pp)
    rows = packed.tokens.shape[1] // parallel.tp
    numbers = parallel.chunks_of(groups.pp_rank)
    for number, module, chunk in zip(numbers, model.modules, model.chunks, strict=True):
        if number:
            received = torch.empty(rows, 1, model.spec.hidden_size)
            dist.recv(received, ranks[(number - 1) % parallel.pp], group=pp)
            module.set_input_tensor(received)
        out = chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
        if number + 1 < parallel.num_chunks:
            dist.send(out, ranks[(number + 1) % parallel.pp], group=pp)
    return out


def logits_of(model: MegatronModel, hidden: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] of hidden states [rows, H], on last-stage ranks."""
    part = hidden @ head_weight(model).T
    parts = [torch.empty_like(part) for _ in range(model.parallel.tp)]
    dist.all_gather(parts, part, group=model.groups.collection.tp)
    return torch.cat(parts, dim=1)[:, : model.spec.vocab_size]


def check_logits(root: Path, case: str, parallel: ParallelConfig, groups: ModelGroups) -> None:
    """Against NAME.logits.pt beside the checkpoint folders."""
    what = f"{case} {parallel}"
    spec = read_spec(root / case)
    config = ModelConfig(path="by-hand")
    model = build_model(spec, config, parallel, groups, head=Head.LM, device=CPU, seed=1, trainable=False)
    load_weights(model, root / case)
    if parallel.tp == 2 and groups.tp_rank == 1 and groups.is_first_stage:
        embedding = model.modules[0].embedding.word_embeddings.weight
        assert embedding.shape == (66, 48), embedding.shape
        assert (embedding[65] == 0).all(), "131 rows over 2 ranks leave one row of padding"
    packed = pack(sequences(spec.vocab_size), multiple_of=parallel.tp)
    with torch.no_grad():
        hidden = forward(model, packed)
        if not groups.is_last_stage:
            return
        assert hidden.shape == (packed.tokens.shape[1], 1, spec.hidden_size)
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
    expected = torch.load(root / f"{case}.logits.pt")
    expected_logprobs = expected.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    # fp32 with other orders of summation over 4 layers: a few ulps of logits that reach about 5
    assert_close(logits, expected, f"logits of {what}")
    assert_close(logprobs, expected_logprobs, f"log-probs of {what}")


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.allclose(found, expected, atol=3e-5, rtol=1e-5), f"{what}: off by {(found - expected).abs().max()}"


def check_all_logits(root: Path, factory: GroupFactory) -> None:
    for parallel in LAYOUTS:
        groups = make_groups(parallel, factory)
        if not groups.is_member:
            continue
        for case in CASES:
            num_layers = read_spec(root / case).num_layers
            chunks = parallel.layers_per_stage or (num_layers // parallel.num_chunks,) * parallel.num_chunks
            if sum(chunks) == num_layers:
                check_logits(root, case, parallel, groups)


def expected_logits(model: "transformers.PreTrainedModel") -> torch.Tensor:
    """By transformers, one sequence at a time; float32 [num_real, vocabulary]."""
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in sequences(model.config.vocab_size)])


LAYOUTS = [
    ParallelConfig(tp=1, pp=1, dp=1),
    ParallelConfig(tp=2, pp=1, dp=1, first_rank=1),
    ParallelConfig(tp=1, pp=2, dp=2),
    ParallelConfig(pp=2, layers_per_stage=(1, 2), first_rank=1),
    ParallelConfig(tp=2, pp=2),
    ParallelConfig(tp=4),  # twice as many as KV heads
    ParallelConfig(tp=2, pp=2, layers_per_stage=(2, 1)),
    ParallelConfig(tp=1, pp=3, layers_per_stage=(1, 2, 1), first_rank=1),
    ParallelConfig(pp=2, vpp=2, dp=2),
    ParallelConfig(tp=2, pp=2, vpp=2),
    ParallelConfig(tp=2, pp=2, vpp=3, layers_per_stage=(1, 1, 2, 1, 1, 1)),
]
