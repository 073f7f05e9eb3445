"""Random admissible models and real layouts, experts and model chunks included: each element once, no byte more.

Megatron to the native engine, to SGLang's fused parameters, and to Megatron again, by the sides' own pure layouts.
"""

from dataclasses import replace
from math import gcd, lcm

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.topology import Fanout, Topology
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.sglang.layout import sglang_layout
from tests.reshard.test_dense_models import SPECS
from tests.reshard.test_fanout import check_filled

DENSE, EXPERTS = ("llama", "mistral", "qwen2", "qwen3"), ("qwen3_moe", "mixtral")
SIZES = st.sampled_from([1, 2, 2, 3, 4])


def pairs_dividing(number: int) -> st.SearchStrategy[tuple[int, int]]:
    """(a, b) whose product divides the number."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return st.sampled_from([(a, b) for a in divisors for b in divisors if number % (a * b) == 0])


@st.composite
def trainers(draw, *, experts: bool) -> ParallelConfig:
    """Sizes of a Megatron layout; where its layers lie is drawn later, by `staged`."""
    tp, dp = draw(SIZES), draw(st.integers(1, 2))
    ep, etp = draw(pairs_dividing(tp * dp)) if experts else (1, 1)
    pp = draw(st.integers(1, 3 if tp < 3 else 2))
    return ParallelConfig(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, vpp=draw(st.integers(1, 2)) if pp > 1 else 1)


def staged(draw, parallel: ParallelConfig, layers: int, first_rank: int) -> ParallelConfig:
    """The layout with its layers in chunks of any sizes."""
    cuts = sorted(draw(st.permutations(range(1, layers)))[: parallel.num_chunks - 1])
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return replace(parallel, layers_per_stage=counts, first_rank=first_rank)


def spec_of(draw, family: str, layers: int, *, tps: tuple[int, int], eps: int, expert_cuts: int) -> ModelSpec:
    """A model that both sides can hold, its other sizes free."""
    kv_heads = draw(
        st.sampled_from([n for n in range(1, lcm(*tps) + 1) if all(n % tp == 0 or tp % n == 0 for tp in tps)])
    )
    heads = lcm(kv_heads, *tps) * draw(st.integers(1, 2))
    head_dim = lcm(*(tp // gcd(tp, 2 * kv_heads) for tp in tps)) * draw(st.integers(1, 2))
    spec = replace(
        SPECS["llama"],
        family=family,
        vocab_size=draw(st.integers(30, 130)),
        hidden_size=draw(st.sampled_from([3, 5])),
        ffn_size=lcm(*tps) * draw(st.integers(1, 2)),
        num_layers=layers,
        num_kv_heads=kv_heads,
        num_heads=heads,
        head_dim=head_dim,
        tied_embeddings=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
    )
    if family in DENSE:
        return spec
    return replace(
        spec, num_experts=eps * draw(st.integers(1, 2)), experts_per_token=1, moe_ffn_size=expert_cuts, ffn_size=7
    )


@st.composite
def pairs(draw) -> tuple[ModelLayout, ModelLayout]:
    """(source, destination) whose pools coincide, overlap or are apart."""
    family = draw(st.sampled_from(DENSE + EXPERTS))
    experts = family in EXPERTS
    kind = draw(st.sampled_from(["megatron", "sglang", "sglang" if experts else "native"]))
    src = draw(trainers(experts=experts))
    to = draw(trainers(experts=experts)) if kind == "megatron" else None
    tp, ep = (to.tp, to.ep) if to else (draw(SIZES), 1)
    if experts and not to:
        ep = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    chunks = max(src.num_chunks, to.num_chunks if to else 1)
    spec = spec_of(
        draw,
        family,
        draw(st.integers(chunks, chunks + 2)),
        tps=(src.tp, tp),
        eps=lcm(src.ep, ep),
        expert_cuts=lcm(src.etp, to.etp if to else tp // ep) * draw(st.integers(1, 2)),
    )
    first = draw(st.sampled_from([0, 0, src.num_ranks // 2, src.num_ranks]))
    source = megatron_layout(spec, staged(draw, src, spec.num_layers, 0), head=Head.LM, dtype="float32")
    if to:
        return source, megatron_layout(spec, staged(draw, to, spec.num_layers, first), head=Head.LM, dtype="float32")
    engines = draw(st.integers(1, 3))
    if kind == "native":
        return source, native_layout(spec, tp=tp, dp=engines, first_rank=first, dtype="float32")
    return source, sglang_layout(spec, tp=tp, ep=ep, dp=engines, first_rank=first, dtype="float32")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(pairs(), st.sampled_from(list(Fanout)), st.sampled_from([1, 3, 8, 100]), st.sampled_from([60, 4000, 1 << 20]))
def test_any_two_layouts_of_one_model_reach_the_bound_of_each_link(pair, fanout, ranks_per_node, bucket_bytes):
    src, dst = pair
    topology = Topology.blocks(max(*src.ranks, *dst.ranks) + 1, ranks_per_node=ranks_per_node)
    check_filled(src, dst, topology, fanout=fanout, bucket_bytes=bucket_bytes)


def test_the_drawn_models_have_experts_chunks_and_ties(monkeypatch):
    """What the property claims to cover is really drawn."""
    seen: set[str] = set()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(pairs())
    def collect(pair):
        names = " ".join(pair[0].tensors)
        seen.add("experts" if "experts" in names else "dense")
        seen.add("untied" if "lm_head" in names else "tied")
        params = {one.param for layout in pair for rank in layout.ranks for one in layout.holdings(rank)}
        seen.update(
            side
            for side, mark in (("sglang", "w13_weight"), ("native", "attn_out"), ("grouped", "local_experts.1"))
            if any(mark in name for name in params)
        )
        if len({one.tensor.split(".")[-2] for one in pair[0].holdings(0) if "qkv.weight" in one.param}) < 3:
            seen.add("a rank without a query, key or value")
        ours = {len({one.param for one in pair[0].holdings(rank)}) for rank in pair[0].ranks}
        seen.update({"uneven"} if len(ours) > 2 else ())

    collect()
    assert seen == {
        "experts",
        "dense",
        "untied",
        "tied",
        "sglang",
        "native",
        "grouped",
        "uneven",
        "a rank without a query, key or value",
    }
