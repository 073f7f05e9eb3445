"""Where weights lie in stored tensors: all of them once, and the same by way of logical tensors or of any rank."""

from collections.abc import Iterable, Mapping

import torch
from hypothesis import given, settings
from torch import Tensor

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import OUTPUT, megatron_layout, param_shapes
from rlhf.mcore.stored import StoredPiece, held_of_stored, stored_pieces, stored_shapes
from tests.mcore.stand_in import tiny_moe_spec, tiny_spec
from tests.mcore.test_layout import layouts

EXPERT_LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(tp=2, dp=2, ep=2),
    ParallelConfig(dp=4, ep=2, etp=2),
    ParallelConfig(tp=4, pp=2, ep=2, first_rank=1, layers_per_stage=(2, 1)),
    ParallelConfig(tp=2, dp=3, ep=3, etp=2),
)


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Each element another number."""
    return {
        name: 100_000 * at + torch.arange(torch.Size(shape).numel()).reshape(shape)
        for at, (name, shape) in enumerate(shapes.items())
    }


def stored_of(spec: ModelSpec, head: Head, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors, -1 where nothing was put."""
    stored = {key: torch.full(shape, -1) for key, shape in stored_shapes(spec, head=head).items()}
    for piece in stored_pieces(spec, head=head):
        part = stored[piece.key][piece.stored_box(piece.box).slices]
        assert (part == -1).all(), f"{piece}: written twice"
        part.copy_(logical[piece.tensor][piece.box.slices].reshape(part.shape))
    return stored


def params_by(
    pieces: Iterable[StoredPiece], stored: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    params = {name: torch.full(shape, -1) for name, shape in shapes.items()}
    for piece in pieces:
        part = params[piece.tensor][piece.box.slices]
        part.copy_(stored[piece.key][piece.stored_box(piece.box).slices].reshape(part.shape))
    return params


def check(spec: ModelSpec, parallel: ParallelConfig, head: Head) -> None:
    layout = megatron_layout(spec, parallel, head=head, dtype="float32")
    logical = numbered(layout.tensors)
    stored = stored_of(spec, head, logical)
    assert all((tensor >= 0).all() for tensor in stored.values())
    assert sum(tensor.numel() for tensor in stored.values()) == sum(tensor.numel() for tensor in logical.values())
    counts = {key: torch.zeros(tensor.shape, dtype=torch.int64) for key, tensor in stored.items()}
    for rank in layout.ranks:
        stage = (rank - parallel.first_rank) // parallel.tp % parallel.pp
        shapes = param_shapes(spec, parallel, head=head, stage=stage)
        wanted = {name: torch.full(shape, -1) for name, shape in shapes.items()}
        for held in layout.holdings(rank):
            wanted[held.param][held.param_box(held.box).slices] = logical[held.tensor][held.box.slices]
        found = held_of_stored(spec, parallel, head=head, rank=rank)
        held_params = {piece.tensor for piece in found}
        if not spec.num_experts:
            padding_only = {name for name, param in wanted.items() if (param == -1).all()}
            assert held_params | padding_only == set(shapes)
        params = params_by(found, stored, {name: shapes[name] for name in held_params})
        for name in held_params:
            assert torch.equal(params[name], wanted[name]), f"rank {rank}: {name}"
        for piece in held_of_stored(spec, parallel, head=head, rank=rank, without_replicas=True):
            counts[piece.key][piece.stored_box(piece.box).slices] += 1
    for key, found in counts.items():
        replicas = parallel.tp * parallel.dp // (parallel.ep * parallel.etp) if "experts" in key else parallel.dp
        assert (found == replicas).all(), key


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_any_rank_of_a_dense_model_finds_its_parameters_in_the_stored_tensors(
    case: tuple[ModelSpec, ParallelConfig, Head],
) -> None:
    check(*case)


def test_any_rank_of_a_model_with_experts_finds_its_parameters_in_the_stored_tensors() -> None:
    for parallel in EXPERT_LAYOUTS:
        check(tiny_moe_spec(num_layers=3), parallel, Head.LM)
        check(tiny_moe_spec(num_layers=3, tied_embeddings=True), parallel, Head.VALUE)


def test_layers_apart_are_slices_of_the_stacked_ones() -> None:
    for spec in (tiny_spec(family="qwen2", qkv_bias=True), tiny_moe_spec()):
        logical = numbered(megatron_layout(spec, ParallelConfig(), head=Head.LM, dtype="float32").tensors)
        stacked = stored_of(spec, Head.LM, logical)
        shapes = stored_shapes(spec, head=Head.LM, layers_apart=True)
        found = {key: torch.full(shape, -1) for key, shape in shapes.items()}
        for piece in stored_pieces(spec, head=Head.LM, layers_apart=True):
            part = found[piece.key][piece.stored_box(piece.box).slices]
            part.copy_(logical[piece.tensor][piece.box.slices].reshape(part.shape))
        wanted = {}
        for key, tensor in stacked.items():
            before, *inside = key.split("decoder.layers.")
            if inside:
                wanted |= {f"{before}decoder.layers.{at}.{inside[0]}": layer for at, layer in enumerate(tensor)}
            else:
                wanted[key] = tensor
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_tied_head_is_stored_with_the_embedding_and_a_value_head_as_an_output_layer() -> None:
    spec = tiny_spec(tied_embeddings=True)
    assert OUTPUT not in stored_shapes(spec, head=Head.LM)
    assert stored_shapes(spec, head=Head.VALUE)[OUTPUT] == (1, spec.hidden_size)
    last = [
        piece for piece in held_of_stored(spec, ParallelConfig(pp=2), head=Head.LM, rank=1) if piece.tensor == OUTPUT
    ]
    assert [piece.key for piece in last] == ["embedding.word_embeddings.weight"]
