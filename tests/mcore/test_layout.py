"""Who holds what: every element of every tensor, and the places of fused weights built another way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.parallel import ParallelConfig
from rlhf.errors import ConfigError, LayoutError
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import EMBEDDING, OUTPUT, frozen_params, megatron_layout
from tests.mcore.stand_in import tiny_spec

FAMILIES = {
    "llama": {},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
}


@st.composite
def layouts(draw) -> tuple[ModelSpec, ParallelConfig, Head]:
    num_layers = draw(st.integers(1, 7))
    spec = tiny_spec(
        **FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))],
        num_kv_heads=draw(st.sampled_from([4, 2, 1])),  # shared by tp ranks where there are fewer than those
        vocab_size=draw(st.integers(5, 40)),
        num_layers=num_layers,
        tied_embeddings=draw(st.booleans()),
    )
    pp = draw(st.integers(1, min(num_layers, 4)))
    vpp = draw(st.integers(1, num_layers // pp)) if pp > 1 else 1
    cuts = sorted(draw(st.permutations(range(1, num_layers)))[: pp * vpp - 1])
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True))
    parallel = ParallelConfig(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=pp,
        vpp=vpp,
        dp=draw(st.integers(1, 2)),
        first_rank=draw(st.integers(0, 3)),
        layers_per_stage=stages,
    )
    return spec, parallel, draw(st.sampled_from(Head))


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_element_is_held_once_by_each_replica(case: tuple[ModelSpec, ParallelConfig, Head]) -> None:
    spec, parallel, head = case
    layout = megatron_layout(spec, parallel, head=head, dtype="float32")
    held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in layout.tensors.items()}
    for rank in layout.ranks:
        for piece in layout.holdings(rank):
            held[piece.tensor][piece.box.slices] += 1
    replicated = {"norm.weight": parallel.tp, "layernorm.weight": parallel.tp, "score.weight": parallel.tp}
    for name, counts in held.items():
        copies = next((n for end, n in replicated.items() if name.endswith(end)), 1)
        if name == "model.embed_tokens.weight" and spec.tied_embeddings and head is Head.LM and parallel.pp > 1:
            copies = 2
        assert (counts == copies * parallel.dp).all(), name


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_no_place_in_a_parameter_is_given_twice(case: tuple[ModelSpec, ParallelConfig, Head]) -> None:
    spec, parallel, head = case
    layout = megatron_layout(spec, parallel, head=head, dtype="float32")
    for rank in layout.ranks:
        places: dict[str, set[tuple[int, ...]]] = {}
        for piece in layout.holdings(rank):
            box = piece.param_box(piece.box)
            mine = set(
                map(
                    tuple,
                    torch.cartesian_prod(*(torch.arange(*s) for s in box.spans)).reshape(-1, len(box.spans)).tolist(),
                )
            )
            assert not mine & places.setdefault(piece.param, set()), piece
            places[piece.param] |= mine


def filled(spec: ModelSpec, parallel: ParallelConfig, rank: int, param: str) -> torch.Tensor:
    """A parameter of a rank when each logical tensor holds its own name's number and its indices; -1 elsewhere."""
    layout = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    pieces = [piece for piece in layout.holdings(rank) if piece.param == param]
    shape = [max(stop for _, stop in spans) for spans in zip(*(p.param_box(p.box).spans for p in pieces), strict=True)]
    out = torch.full(shape, -1)
    for piece in pieces:
        out[piece.param_box(piece.box).slices] = logical(layout.tensors, piece.tensor)[piece.box.slices]
    return out


def logical(tensors, name: str) -> torch.Tensor:
    """Numbers that tell a tensor and a place in it apart from all others."""
    base = sorted(tensors).index(name) * 100_000
    return base + torch.arange(int(torch.tensor(tensors[name]).prod())).reshape(tensors[name])


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_qkv_goes_by_kv_head(tp_rank: int, kind: str) -> None:
    spec, parallel = tiny_spec(family="qwen2", qkv_bias=True), ParallelConfig(tp=2, pp=2)
    tensors = megatron_layout(spec, parallel, head=Head.LM, dtype="float32").tensors
    q, k, v = (logical(tensors, f"model.layers.3.self_attn.{x}_proj.{kind}") for x in "qkv")
    q = q.reshape(4, 3, 6, -1)  # KV head, query head that shares it, head_dim, input
    k, v = (x.reshape(4, 1, 6, -1) for x in (k, v))
    expected = torch.cat([q, k, v], dim=1).chunk(2)[tp_rank].reshape(2 * 5 * 6, -1)
    found = filled(spec, parallel, 2 + tp_rank, f"decoder.layers.1.self_attention.linear_qkv.{kind}")
    assert torch.equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_more_ranks_than_kv_heads_cut_qkv_inside_a_group(num_kv_heads: int, kind: str) -> None:
    """Rows of a head are cut too: of one KV head's 72 + 6 + 6 rows each rank has 21, of two 24."""
    spec = tiny_spec(family="qwen2", qkv_bias=True, num_kv_heads=num_kv_heads)
    tensors = megatron_layout(spec, ParallelConfig(tp=4), head=Head.LM, dtype="float32").tensors
    q, k, v = (logical(tensors, f"model.layers.3.self_attn.{x}_proj.{kind}") for x in "qkv")
    by_group = [x.reshape(num_kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    fused = torch.cat(by_group, dim=1).flatten(0, 1)
    for rank, expected in enumerate(fused.chunk(4)):
        found = filled(spec, ParallelConfig(tp=4), rank, f"decoder.layers.3.self_attention.linear_qkv.{kind}")
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_gate_lies_above_up(tp_rank: int) -> None:
    spec, parallel = tiny_spec(), ParallelConfig(tp=2, layers_per_stage=(4,))
    tensors = megatron_layout(spec, parallel, head=Head.LM, dtype="float32").tensors
    gate, up = (logical(tensors, f"model.layers.0.mlp.{x}_proj.weight").chunk(2)[tp_rank] for x in ("gate", "up"))
    assert torch.equal(filled(spec, parallel, tp_rank, "decoder.layers.0.mlp.linear_fc1.weight"), torch.cat([gate, up]))


def test_padded_vocabulary_rows_belong_to_no_box() -> None:
    layout = megatron_layout(tiny_spec(vocab_size=5), ParallelConfig(tp=4), head=Head.LM, dtype="float32")
    held = [[p.box.spans[0] for p in layout.holdings(rank) if p.param == EMBEDDING] for rank in layout.ranks]
    assert held == [[(0, 2)], [(2, 4)], [(4, 5)], []]


def test_a_tied_weight_is_one_tensor_on_first_and_last_stage() -> None:
    spec = tiny_spec(tied_embeddings=True)
    layout = megatron_layout(spec, ParallelConfig(pp=4), head=Head.LM, dtype="float32")
    assert "lm_head.weight" not in layout.tensors
    holders = {
        (rank, p.param)
        for rank in layout.ranks
        for p in layout.holdings(rank)
        if p.tensor == "model.embed_tokens.weight"
    }
    assert holders == {(0, EMBEDDING), (3, OUTPUT)}


def test_chunks_go_round_the_stages_and_a_stage_numbers_their_layers_through() -> None:
    spec = tiny_spec(num_layers=7, tied_embeddings=True)
    parallel = ParallelConfig(pp=2, vpp=3, layers_per_stage=(1, 1, 2, 1, 1, 1))
    layout = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    down = [
        {p.param: p.tensor for p in layout.holdings(rank) if p.tensor.endswith("down_proj.weight")} for rank in (0, 1)
    ]
    assert down == [
        {
            f"decoder.layers.{at}.mlp.linear_fc2.weight": f"model.layers.{layer}.mlp.down_proj.weight"
            for at, layer in enumerate(layers)
        }
        for layers in ((0, 2, 3, 5), (1, 4, 6))
    ]
    assert [EMBEDDING in {p.param for p in layout.holdings(rank)} for rank in (0, 1)] == [True, False]
    assert [OUTPUT in {p.param for p in layout.holdings(rank)} for rank in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"num_kv_heads": 6}, "num_kv_heads = 6 and is no multiple of it"),
        ({"num_kv_heads": 2, "num_heads": 6}, "num_heads = 6"),
        ({"num_kv_heads": 1, "num_heads": 4, "head_dim": 3}, "rows of q, k and v = 18"),
        ({"ffn_size": 22}, "ffn_size = 22"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_is_refused_by_name(numbers: dict[str, int], named: str) -> None:
    with pytest.raises(LayoutError, match=f"parallel.tp: 4 does not divide the model's {named}"):
        megatron_layout(tiny_spec(**numbers), ParallelConfig(tp=4), head=Head.LM, dtype="float32")


def test_stages_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers_per_stage"):
        megatron_layout(tiny_spec(), ParallelConfig(pp=2, layers_per_stage=(1, 2)), head=Head.LM, dtype="float32")


def test_half_of_a_parameter_cannot_be_frozen() -> None:
    up = frozenset({"model.layers.0.mlp.up_proj.weight"})
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.linear_fc1\.weight holds frozen tensors and others"):
        frozen_params(tiny_spec(), ParallelConfig(), head=Head.LM, stage=0, frozen=up)
