"""The dense families from Megatron's layout into the native engine's, by the two sides' pure layouts."""

from dataclasses import replace
from math import gcd, lcm

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.config.parallel import ParallelConfig
from rlhf.errors import LayoutError
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.check import certify
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from rlhf.rollout.native.layout import native_layout
from tests.harness.ranks import run_ranks
from tests.reshard.gloo import as_table, several_pools
from tests.reshard.threads import run_plan
from tests.reshard.toy import assembled, brute_force_bound, empty_params, filled_params, full_tensors

LLAMA = ModelSpec(
    family="llama",
    vocab_size=101,  # ends inside the padding of every tp > 1
    hidden_size=10,
    ffn_size=24,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_positions=64,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
)
SPECS = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, family="mistral", num_kv_heads=8),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tied_embeddings=True, num_kv_heads=2, head_dim=3),
}

PAIRS = [
    # tp, pp, dp, layers per stage, engine tp, engines, first engine rank
    (1, 1, 1, (), 1, 1, 0),
    (2, 2, 1, (1, 2), 2, 2, 0),
    (2, 3, 1, (), 4, 1, 1),
    (2, 1, 2, (), 8, 1, 0),
    (1, 2, 2, (2, 1), 4, 1, 4),
    (2, 1, 4, (), 1, 8, 0),
]


def pair(spec: ModelSpec, tp, pp, dp, stages, engine_tp, engines, first) -> tuple[ModelLayout, ModelLayout]:
    parallel = ParallelConfig(tp=tp, pp=pp, dp=dp, layers_per_stage=stages)
    src = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    return src, native_layout(spec, tp=engine_tp, dp=engines, first_rank=first, dtype="float32")


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    "sizes", PAIRS, ids=lambda sizes: f"tp{sizes[0]}pp{sizes[1]}dp{sizes[2]}-tp{sizes[4]}x{sizes[5]}"
)
def test_engine_shards_equal_slices_of_the_assembled_model(family, sizes):
    src, dst = pair(SPECS[family], *sizes)
    plan = make_plan(src, dst, Topology.blocks(max(*src.ranks, *dst.ranks) + 1, ranks_per_node=4))
    certificate, full = certify(plan), full_tensors(src.tensors)
    src_params = {rank: filled_params(src, rank, full, padding=5) for rank in plan.ranks}
    dst_params = {rank: empty_params(dst, rank, fill=-7.0, padding=4) for rank in plan.ranks}
    traffic = run_plan(plan, src_params, dst_params, bucket_bytes=4000)
    whole = assembled(src, src_params)
    for rank in dst.ranks:
        expected = empty_params(dst, rank, fill=-7.0, padding=4)
        for one in dst.holdings(rank):
            expected[one.param][one.param_box(one.box).slices] = whole[one.tensor][one.box.slices]
        assert all(torch.equal(dst_params[rank][name], expected[name]) for name in expected)
    bound = brute_force_bound(src, dst)
    received = {rank: sum(traffic[rank].received.values()) for rank in dst.ranks}
    assert received == {rank: 4 * bound[rank] for rank in dst.ranks}
    assert certificate.ratio == 1.0


@st.composite
def admissible(draw):
    """A model and sizes that both sides admit: all of 1..8, dividing one another or not."""
    tp, engine_tp = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    both = lcm(tp, engine_tp)
    fits = [kv for kv in range(1, both + 1) if all(kv % t == 0 or t % kv == 0 for t in (tp, engine_tp))]
    kv_heads = draw(st.sampled_from(fits))
    layers = draw(st.integers(1, 8))
    pp = draw(st.integers(1, layers))
    cuts = sorted(draw(st.permutations(range(1, layers)))[: pp - 1])
    spec = replace(
        SPECS[draw(st.sampled_from(sorted(SPECS)))],
        num_layers=layers,
        num_kv_heads=kv_heads,
        num_heads=lcm(kv_heads, both) * draw(st.integers(1, 2)),
        head_dim=tp // gcd(tp, 2 * kv_heads) * draw(st.integers(1, 3)),  # rows of q, k and v are cut evenly
        ffn_size=both * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(40, 600)),
    )
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    dp = draw(st.integers(1, 8 if tp * pp <= 4 else 2))
    first = draw(st.integers(0, tp * pp * dp))
    return spec, (tp, pp, dp, stages, engine_tp, draw(st.integers(1, 3)), first)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(admissible(), st.sampled_from([1, 4, 8, 1000]))
def test_any_admissible_sizes_reach_the_lower_bound(model_and_sizes, ranks_per_node):
    spec, sizes = model_and_sizes
    src, dst = pair(spec, *sizes)
    topology = Topology.blocks(max(*src.ranks, *dst.ranks) + 1, ranks_per_node=ranks_per_node)
    certificate = certify(make_plan(src, dst, topology))
    bound = brute_force_bound(src, dst)
    assert {one.rank: one.moved for one in certificate.ranks} == {
        one.rank: 4 * bound.get(one.rank, 0) for one in certificate.ranks
    }
    assert certificate.ratio == 1.0


@pytest.mark.parametrize("family", SPECS)
def test_reverse_way_fills_megatron_shards(family):
    """An engine's layout is one like any other: weights go back the same way, replicated KV heads included."""
    dst, src = pair(SPECS[family], 2, 2, 1, (1, 2), 4, 1, 2)
    plan = make_plan(src, dst, Topology.blocks(6, ranks_per_node=6))
    full = full_tensors(src.tensors)
    src_params = {rank: filled_params(src, rank, full) for rank in plan.ranks}
    dst_params = {rank: empty_params(dst, rank, fill=0.0) for rank in plan.ranks}
    run_plan(plan, src_params, dst_params, bucket_bytes=1 << 20)
    assert certify(plan).ratio == 1.0
    back = assembled(dst, dst_params)
    assert all(torch.equal(back[name], full[name]) for name in full)


def test_fused_shards_are_what_each_side_computes_with():
    """Megatron's QKV (by KV group) and fc1, and the engine's, built here from whole tensors in another way."""
    spec = SPECS["llama"]
    src, dst = pair(spec, 2, 1, 1, (), 4, 1, 0)
    full = full_tensors(src.tensors)
    q, k, v = (full[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    by_group = [t.view(spec.num_kv_heads, -1, spec.hidden_size) for t in (q, k, v)]
    fused = torch.cat(by_group, dim=1).view(2, -1, spec.hidden_size)
    gate, up = (full[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    for rank in (0, 1):
        params = filled_params(src, rank, full)
        assert torch.equal(params["decoder.layers.1.self_attention.linear_qkv.weight"], fused[rank])
        both = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(params["decoder.layers.1.mlp.linear_fc1.weight"], both)
    for rank in range(4):
        params = filled_params(dst, rank, full)
        assert torch.equal(params["layers.1.qkv.weight"], torch.cat([t.chunk(4)[rank] for t in (q, k, v)]))


def test_critic_is_no_source_for_an_engine():
    critic = megatron_layout(LLAMA, ParallelConfig(tp=2), head=Head.VALUE, dtype="float32")
    engine = native_layout(LLAMA, tp=2, dp=1, first_rank=0, dtype="float32")
    with pytest.raises(LayoutError, match=r"score\.weight is held at the source but unknown at the destination"):
        make_plan(critic, engine, Topology.blocks(2, ranks_per_node=2))


def test_other_model_or_dtype_is_refused_by_name():
    actor = megatron_layout(LLAMA, ParallelConfig(tp=2), head=Head.LM, dtype="float32")
    topology = Topology.blocks(2, ranks_per_node=2)
    wider = replace(LLAMA, ffn_size=48)
    with pytest.raises(LayoutError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight has shape \(24, 10\)"):
        make_plan(actor, native_layout(wider, tp=2, dp=1, first_rank=0, dtype="float32"), topology)
    with pytest.raises(LayoutError, match="dtype float32 at the source, bfloat16 at the destination"):
        make_plan(actor, native_layout(LLAMA, tp=2, dp=1, first_rank=0, dtype="bfloat16"), topology)
    tied = replace(LLAMA, tied_embeddings=True)
    with pytest.raises(LayoutError, match=r"lm_head\.weight is held at the source"):
        make_plan(actor, native_layout(tied, tp=2, dp=1, first_rank=0, dtype="float32"), topology)


@pytest.mark.dist
def test_eight_processes_fill_engines_of_every_family():
    """tp4 pp2 -> 4 engines of 2; 6 ranks with uneven stages -> tp 8, KV heads replicated; overlapping and apart."""
    pairs = {
        "same ranks": pair(SPECS["llama"], 4, 2, 1, (1, 2), 2, 4, 0),
        "overlap, kv heads replicated": pair(SPECS["qwen3"], 2, 3, 1, (), 8, 1, 0),
        "apart, data parallel": pair(SPECS["qwen2"], 2, 1, 2, (), 2, 2, 4),
        "overlap": pair(SPECS["qwen2"], 2, 2, 1, (2, 1), 4, 1, 3),
    }
    run_ranks(8, several_pools, 8, {name: (as_table(src), as_table(dst)) for name, (src, dst) in pairs.items()})
