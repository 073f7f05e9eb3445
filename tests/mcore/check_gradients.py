"""Each weight's gradient equals transformers' in every layout, and Megatron never asks the global parallel state."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)

from rlhf.config.model import ModelConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.registry import read_spec
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.interleaved_p2p import InterleavedP2P
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import load_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from rlhf.mcore.params import local_params
from rlhf.mcore.vocab_parallel import vocab_parallel_logprobs
from tests.mcore.tiny import pack, sequences

CPU = torch.device("cpu")
LENGTHS = (9, 2, 23, 6, 5, 14, 3, 11)
"""Microbatches on each of two replicas; the even sequences are replica 0's."""


def forbid_parallel_state() -> None:
    """Make every getter of the global state raise, also where it was imported by name."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("megatron.core.parallel_state was asked")

    getters = {
        value
        for name, value in vars(parallel_state).items()
        if callable(value) and (name.startswith(("get_", "is_")) or name.endswith("is_initialized"))
    }
    assert parallel_state.get_tensor_model_parallel_group in getters
    assert len(getters) > 50
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type(refuse)) and value in getters:
                setattr(module, name, refuse)


def token_weights(row: torch.Tensor) -> torch.Tensor:
    """A weight for each prediction, so that no two tokens count alike."""
    return torch.linspace(0.3, 1.7, len(row)) * (1 + row % 3)


def loss_of(model: MegatronModel, hidden: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """Sum over rows; the weight is applied outside the module, as the trainer does."""
    hidden = hidden[:, 0]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    parts = [hidden[end - len(row) : end] for row, end in zip(rows, ends, strict=True)]
    if model.head is Head.VALUE:
        return sum(
            ((x @ head_weight(model).T)[:, 0] * token_weights(r)).sum() for x, r in zip(parts, rows, strict=True)
        )
    logprobs, entropy = vocab_parallel_logprobs(
        torch.cat([x[:-1] for x in parts]),
        head_weight(model),
        torch.cat([row[1:] for row in rows]),
        tp_group=model.groups.collection.tp,
        vocab_size=model.spec.vocab_size,
        temperature=0.8,
        chunk_tokens=7,
    )
    weights = torch.cat([token_weights(row[1:]) for row in rows])
    return (weights * (0.5 * entropy - logprobs)).sum()


def expected_gradients(folder: Path, head: Head) -> dict[str, torch.Tensor]:
    """By transformers in float64, one sequence at a time."""
    import transformers

    kind = transformers.AutoModelForCausalLM if head is Head.LM else transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # of no effect on a dense model
    for row in sequences(model.config.vocab_size, LENGTHS):
        if head is Head.VALUE:
            hidden = model.model(row[None]).last_hidden_state[0]
            (model.score(hidden)[:, 0] * token_weights(row)).sum().backward()
            continue
        logprobs = (model(row[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(1, row[1:, None])[:, 0]
        (token_weights(row[1:]) * (0.5 * entropy - chosen)).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@contextmanager
def no_messages_over_the_world() -> Iterator[None]:
    """Single messages between ranks must name a group."""
    posts = dist.isend, dist.irecv

    def checked(post):
        def call(tensor, peer, *, group):
            assert group not in (None, dist.group.WORLD)
            return post(tensor, peer, group=group)

        return call

    dist.isend, dist.irecv = map(checked, posts)
    yield
    dist.isend, dist.irecv = posts


def run_backward(
    model: MegatronModel, lengths: Sequence[int] = LENGTHS, communicator: P2PCommunicator | None = None
) -> None:
    """Megatron's own schedule over this replica's microbatches: two, or two rounds through the stages' chunks."""
    rows = sequences(model.spec.vocab_size, lengths)[model.groups.dp_rank :: model.parallel.dp]
    number = 2 * model.parallel.microbatch_multiple
    microbatches = [rows[len(rows) * i // number : len(rows) * (i + 1) // number] for i in range(number)]
    collection = model.groups.collection
    inputs = [iter(microbatches) for _ in model.chunks]

    def forward_step(data, chunk):
        mine = next(data)
        packed = pack(mine, multiple_of=model.parallel.tp)
        out = chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.params)
        return out, lambda hidden: (loss_of(model, hidden, mine), torch.zeros([], dtype=torch.int), {})

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    interleaved = model.parallel.vpp > 1
    schedule = forward_backward_no_pipelining
    if interleaved:
        schedule = forward_backward_pipelining_with_interleaving
        tokens = [pack(mine, multiple_of=model.parallel.tp).tokens.numel() for mine in microbatches]
        communicator = communicator or InterleavedP2P(model, [count // model.parallel.tp for count in tokens])
    elif model.parallel.pp > 1:
        schedule = forward_backward_pipelining_without_interleaving
        communicator = P2PCommunicator(collection.pp, model.config)
    schedule(
        forward_step_func=forward_step,
        data_iterator=inputs if interleaved else inputs[0],
        model=list(model.chunks) if interleaved else model.chunk,
        num_microbatches=number,
        seq_length=max(lengths) if interleaved else 1,
        micro_batch_size=1,
        forward_only=False,
        pg_collection=collection,
        force_all_reduce=True,
        **({"p2p_communicator": communicator} if communicator else {}),
    )


def main_grads(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Gradients by the layout's names."""
    grads = [param.main_grad for module in model.modules for param in module.parameters()]
    return dict(zip(local_params(model), grads, strict=True))


def check_gradients(model: MegatronModel, expected: dict[str, torch.Tensor], what: str) -> None:
    params = main_grads(model)
    layout = megatron_layout(model.spec, model.parallel, head=model.head, dtype="float32")
    for piece in layout.holdings(model.groups.rank):
        wanted = expected[piece.tensor][piece.box.slices].float()
        found = params[piece.param][piece.param_box(piece.box).slices]
        # fp32 against float64: sums of up to 73 tokens' terms, relative to the largest gradient of the tensor
        bound = 2e-5 * float(expected[piece.tensor].abs().max())
        off = float((found - wanted).abs().max())
        assert off <= bound, f"{what}: {piece.tensor} in {piece.param}: off by {off}, bound {bound}"


def check_step(model: MegatronModel) -> None:
    """The distributed optimizer moves the weights, and both ends of a tied weight alike."""
    before = {name: param.clone() for name, param in local_params(model).items()}
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0, params_dtype=torch.float32
    )
    optimizer = get_megatron_optimizer(
        config, list(model.chunks), use_gloo_process_groups=False, pg_collection=model.groups.collection
    )
    succeeded, grad_norm, _ = optimizer.step()
    assert succeeded
    assert grad_norm > 0
    for name, param in local_params(model).items():
        assert torch.isfinite(param).all(), name
        assert not torch.equal(param, before[name]), name
    if model.modules[0].share_embeddings_and_output_weights and model.parallel.pp > 1:
        groups, ends = model.groups, (model.modules[0], model.modules[-1])
        if groups.is_first_stage or groups.is_last_stage:
            weight = ends[groups.is_last_stage].shared_embedding_or_output_weight()
            copies = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(copies, weight.detach(), group=model.groups.collection.embd)
            assert torch.equal(*copies)


def check_what_upstream_does_to_chunks(model: MegatronModel, what: str) -> None:
    """Upstream's own messages at pp 2 give other gradients and say nothing; so comparing gradients does find it.

    Microbatches are of one length, since shapes that are mistaken for one another would be noticed.
    """
    run_backward(model, (5,) * 8)
    ours = {name: grad.clone() for name, grad in main_grads(model).items()}
    model.config.overlap_p2p_comm, model.config.batch_p2p_comm = False, True
    with pytest.raises(AssertionError, match="needs True, False"):
        InterleavedP2P(model, [5] * 4)
    run_backward(model, (5,) * 8, P2PCommunicator(model.groups.collection.pp, model.config))
    worst = max(
        float((grad - ours[name]).abs().max() / ours[name].abs().max()) for name, grad in main_grads(model).items()
    )
    assert worst > 0.1, what


def check_all_gradients(root: Path, factory: GroupFactory) -> None:
    for case, parallel, head, recompute in CHECKS:
        groups = make_groups(parallel, factory)
        if not groups.is_member:
            continue
        folder = root / (f"{case}.reward" if head is Head.VALUE else case)
        spec = read_spec(folder)
        config = ModelConfig(path="by-hand", recompute=recompute)
        model = build_model(spec, config, parallel, groups, head=head, device=CPU, seed=1, trainable=True)
        load_weights(model, folder)
        what = f"{case} {parallel} {recompute}"
        with no_messages_over_the_world() if parallel.vpp > 1 else nullcontext():
            run_backward(model)
        check_gradients(model, torch.load(root / f"{case}.grads.pt"), what)
        check_step(model)
        if (parallel.tp, parallel.pp, parallel.vpp) == (1, 2, 2):
            check_what_upstream_does_to_chunks(model, what)


CHECKS = [
    ("qwen2", ParallelConfig(tp=2, pp=2), Head.LM, "none"),
    ("qwen2", ParallelConfig(pp=2, dp=2), Head.LM, "full"),
    ("qwen3", ParallelConfig(tp=2, dp=2), Head.LM, "none"),
    ("llama", ParallelConfig(tp=2, pp=2, layers_per_stage=(1, 3)), Head.VALUE, "full"),
    ("qwen2", ParallelConfig(tp=4), Head.LM, "none"),
    ("qwen3", ParallelConfig(tp=4), Head.LM, "full"),
    ("llama", ParallelConfig(tp=4), Head.VALUE, "none"),
    ("qwen3", ParallelConfig(pp=3, layers_per_stage=(1, 1, 1), first_rank=1), Head.LM, "none"),
    ("mistral", ParallelConfig(tp=2, pp=2), Head.LM, "none"),
    ("qwen2", ParallelConfig(pp=2, vpp=2, dp=2), Head.LM, "none"),
    ("qwen2", ParallelConfig(tp=2, pp=2, vpp=2), Head.LM, "none"),
    ("llama", ParallelConfig(tp=2, pp=2, vpp=2), Head.VALUE, "full"),
    ("deep", ParallelConfig(pp=2, vpp=3, layers_per_stage=(1, 1, 2, 1, 1, 1), first_rank=2), Head.LM, "none"),
    ("deep", ParallelConfig(pp=3, vpp=2, layers_per_stage=(2, 1, 1, 1, 1, 1)), Head.LM, "none"),
]
