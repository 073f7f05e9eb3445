"""Models with experts from one Megatron layout into another, whatever ep, etp, tp, stages and chunks of either."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.check import certify
from rlhf.reshard.layout import ModelLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from tests.mcore.stand_in import tiny_moe_spec
from tests.reshard.threads import run_plan
from tests.reshard.toy import assembled, brute_force_bound, empty_params, filled_params, full_tensors

NUM_LAYERS = 4
STAGES = ((1, 1, ()), (2, 1, (1, 3)), (3, 1, (1, 2, 1)), (2, 2, (1, 1, 1, 1)))
"""pp, vpp, layers."""


@st.composite
def parallels(draw: st.DrawFn) -> ParallelConfig:
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    cuts = [(ep, etp) for ep in (1, 2, 3, 6) for etp in (1, 2, 7) if tp * dp % (ep * etp) == 0]
    (ep, etp), (pp, vpp, stages) = draw(st.sampled_from(cuts)), draw(st.sampled_from(STAGES))
    first_rank = draw(st.integers(0, 6))
    return ParallelConfig(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=etp, first_rank=first_rank, layers_per_stage=stages)


specs = st.builds(
    tiny_moe_spec,
    family=st.sampled_from(["qwen3_moe", "mixtral"]),
    num_layers=st.just(NUM_LAYERS),
    tied_embeddings=st.booleans(),
    vocab_size=st.integers(40, 60),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs, parallels(), parallels(), st.sampled_from([1, 4, 1000]))
def test_any_layout_of_experts_fills_any_other_at_the_lower_bound(
    spec: ModelSpec, source: ParallelConfig, target: ParallelConfig, ranks_per_node: int
) -> None:
    src, dst = (megatron_layout(spec, one, head=Head.LM, dtype="float32") for one in (source, target))
    last = max(*src.ranks, *dst.ranks)
    plan = make_plan(src, dst, Topology.blocks(last + 1, ranks_per_node=ranks_per_node))
    certificate, full = certify(plan), full_tensors(src.tensors)
    src_params = {rank: filled_params(src, rank, full) for rank in plan.ranks}
    dst_params = {rank: empty_params(dst, rank, fill=-7.0) for rank in plan.ranks}
    traffic = run_plan(plan, src_params, dst_params, bucket_bytes=4000)
    assert certificate.ratio == 1.0
    bound = brute_force_bound(src, dst)
    assert {rank: sum(traffic[rank].received.values()) for rank in dst.ranks} == {
        rank: 4 * bound[rank] for rank in dst.ranks
    }
    assert_filled(dst, dst_params, full)


def assert_filled(dst: ModelLayout, dst_params: dict, full: dict[str, torch.Tensor]) -> None:
    """Every place that the layout names holds its element; the whole model can be put together again."""
    for rank in dst.ranks:
        for one in dst.holdings(rank):
            found = dst_params[rank][one.param][one.param_box(one.box).slices]
            assert torch.equal(found, full[one.tensor][one.box.slices]), (rank, one)
    whole = assembled(dst, dst_params)
    assert all(torch.equal(whole[name], full[name]) for name in full)
