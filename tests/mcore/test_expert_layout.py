"""Which experts a rank holds and how they are cut, by hand and as a property; names in both layer specs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.parallel import ParallelConfig
from rlhf.families.published import find_published
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout, param_shapes
from rlhf.mcore.params import local_params
from tests.mcore.stand_in import stand_in_model, tiny_moe_spec

Piece = tuple[str, tuple[tuple[int, int], ...], str, tuple[int, ...]]


def experts_of(parallel: ParallelConfig, rank: int, *, layer: int, **changes: object) -> list[Piece]:
    """What a rank holds of a layer's router and experts: tensor, box, parameter, place; names without their layer."""
    layout = megatron_layout(tiny_moe_spec(**changes), parallel, head=Head.LM, dtype="float32")
    prefix = f"model.layers.{layer}.mlp."
    return [
        (p.tensor.removeprefix(prefix), p.box.spans, p.param, p.param_start)
        for p in layout.holdings(rank)
        if p.tensor.startswith(prefix)
    ]


def test_experts_go_over_ep_and_their_rows_over_etp() -> None:
    # Rank 13 = 1 + 2*(0 + 3*2) + 0: tp 1, stage 0 of 3, replica 2; position in the stage 1 + 2*2 = 5 = 1 + 2*(2 + 3*0)
    parallel = ParallelConfig(tp=2, pp=3, dp=3, ep=3, etp=2, layers_per_stage=(1, 1, 2))
    whole_hidden = (0, 10)
    assert experts_of(parallel, 13, layer=0) == [
        ("gate.weight", ((0, 6), whole_hidden), "decoder.layers.0.mlp.router.weight", (0, 0)),
        *(
            (f"experts.{expert}.{name}_proj.weight", spans, f"{at}.{param}.weight", start)
            for expert, at in ((4, EXPERT.format(0, 0)), (5, EXPERT.format(0, 1)))
            for name, spans, param, start in (
                ("gate", ((7, 14), whole_hidden), "linear_fc1", (0, 0)),
                ("up", ((7, 14), whole_hidden), "linear_fc1", (7, 0)),
                ("down", (whole_hidden, (7, 14)), "linear_fc2", (0, 0)),
            )
        ),
    ]
    assert experts_of(parallel, 13, layer=1) == []


EXPERT = "decoder.layers.{}.mlp.experts.local_experts.{}"


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        # etp above tp: neighbours in dp share an expert's rows
        (ParallelConfig(dp=4, ep=2, etp=2), {0: (0, 0), 1: (0, 1), 2: (3, 0), 3: (3, 1)}),
        # etp below tp: tensor-parallel peers hold different experts
        (ParallelConfig(tp=2, dp=3, ep=6), {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0), 4: (4, 0), 5: (5, 0)}),
        # neither: every rank holds all of them, whole
        (ParallelConfig(tp=2, dp=2), {0: (0, 0), 1: (0, 0), 2: (0, 0), 3: (0, 0)}),
        # replicas of experts are the last ranks of the stage
        (ParallelConfig(tp=2, dp=2, ep=2), {0: (0, 0), 1: (3, 0), 2: (0, 0), 3: (3, 0)}),
    ],
)
def test_first_expert_and_slice_of_each_rank(parallel: ParallelConfig, expected: dict[int, tuple[int, int]]) -> None:
    size = 14 // parallel.etp
    for rank, (expert, part) in expected.items():
        name, spans, param, _ = experts_of(parallel, rank, layer=0)[1]
        assert (name, spans[0]) == (f"experts.{expert}.gate_proj.weight", (part * size, part * size + size))
        assert param == f"{EXPERT.format(0, 0)}.linear_fc1.weight"


def test_mixtral_names_its_matrices_by_number() -> None:
    spec = tiny_moe_spec(family="mixtral", qk_norm=False)
    layout = megatron_layout(spec, ParallelConfig(), head=Head.LM, dtype="float32")
    held = {p.tensor: (p.param, p.param_start) for p in layout.holdings(0) if ".experts.3." in p.tensor}
    stem, at = "model.layers.1.block_sparse_moe.experts.3", EXPERT.format(1, 3)
    assert held[f"{stem}.w1.weight"] == (f"{at}.linear_fc1.weight", (0, 0))
    assert held[f"{stem}.w3.weight"] == (f"{at}.linear_fc1.weight", (14, 0))
    assert held[f"{stem}.w2.weight"] == (f"{at}.linear_fc2.weight", (0, 0))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelSpec, ParallelConfig]:
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    cuts = [(ep, etp) for ep in (1, 2, 3, 6) for etp in (1, 2, 7) if tp * dp % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(cuts))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]))
    more = draw(st.lists(st.integers(0, 1), min_size=pp * vpp, max_size=pp * vpp))
    stages = tuple(1 + extra for extra in more)
    family = draw(st.sampled_from(["qwen3_moe", "mixtral"]))
    spec = tiny_moe_spec(family=family, num_layers=sum(stages), tied_embeddings=draw(st.booleans()))
    first_rank = draw(st.integers(0, 3))
    return spec, ParallelConfig(
        tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, first_rank=first_rank, layers_per_stage=stages
    )


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_element_of_an_expert_is_held_once_by_each_expert_replica(case: tuple[ModelSpec, ParallelConfig]) -> None:
    spec, parallel = case
    layout = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    held = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in layout.tensors.items()}
    for rank in layout.ranks:
        for piece in layout.holdings(rank):
            held[piece.tensor][piece.box.slices] += 1
    for name, counts in held.items():
        if ".experts." in name:
            assert (counts == parallel.tp * parallel.dp // (parallel.ep * parallel.etp)).all(), name
        elif name.endswith("gate.weight"):
            assert (counts == parallel.tp * parallel.dp).all(), name


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_pieces_fill_the_parameters_of_a_stage_but_for_padding(case: tuple[ModelSpec, ParallelConfig]) -> None:
    spec, parallel = case
    layout = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    for rank in layout.ranks:
        stage = (rank - parallel.first_rank) // parallel.tp % parallel.pp
        shapes = param_shapes(spec, parallel, head=Head.LM, stage=stage)
        given_out = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        for piece in layout.holdings(rank):
            given_out[piece.param][piece.param_box(piece.box).slices] += 1
        for name, counts in given_out.items():
            expected = counts.clamp(max=1) if name.endswith(("word_embeddings.weight", "output_layer.weight")) else 1
            assert (counts == expected).all(), (name, rank)


def test_grouped_experts_of_transformer_engine_go_by_the_same_names() -> None:
    model = stand_in_model(tiny_moe_spec(), ParallelConfig(), 0)
    theirs = {
        "decoder.layers.2.mlp.experts.linear_fc1.weight5": torch.zeros(1),
        "decoder.layers.2.mlp.experts.linear_fc2.weight11": torch.zeros(2),
        "decoder.layers.2.mlp.router.weight": torch.zeros(3),
    }
    model.module.named_parameters = lambda: iter(theirs.items())
    assert list(local_params(model)) == [
        "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.local_experts.11.linear_fc2.weight",
        "decoder.layers.2.mlp.router.weight",
    ]


def test_a_rank_of_a_large_model_holds_its_share_to_the_element() -> None:
    published = find_published("qwen3-30b-a3b")
    assert published is not None
    parallel = ParallelConfig(tp=4, pp=2, dp=4, ep=16)
    layout = megatron_layout(published.spec, parallel, head=Head.LM, dtype="bfloat16")
    held = sum(torch.Size(piece.box.shape).numel() for piece in layout.holdings(31))
    attention = (2 * 4096 + 2 * 512) * 2048 // 4
    layer = attention + 2 * 2048 + 2 * 128 + 128 * 2048 + 128 // 16 * 3 * 2048 * 768
    assert held == 24 * layer + 2048 + 151936 // 4 * 2048
