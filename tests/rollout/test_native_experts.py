"""Experts in the native engine: what one computes for a row, and weights that come from Megatron's expert layouts."""

import pytest
import torch

from rlhf.config.parallel import ParallelConfig
from rlhf.config.rollout import SamplingConfig
from rlhf.families.registry import spec_of
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.check import certify
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Topology
from rlhf.rollout.native.ffn import Experts
from rlhf.rollout.native.layout import native_layout
from rlhf.rollout.native.linear import ROW_STEP, Linear
from tests.reshard.threads import run_plan
from tests.reshard.toy import empty_params, filled_params
from tests.rollout.tiny import hf_model, hub_weights, make_engine, prompts

H, F = 44, 20


def slow(hidden, router, gate_up, down, *, per_token: int, divide: bool) -> torch.Tensor:
    """Row by row in float64, from the definition."""
    rows = []
    for x in hidden.double():
        probs = (router.double() @ x).softmax(0)
        best = probs.argsort(descending=True)[:per_token]
        weights = probs[best] / (probs[best].sum() if divide else 1.0)
        total = torch.zeros(H, dtype=torch.float64)
        for weight, expert in zip(weights, best, strict=True):
            gate, up = (gate_up[expert].double() @ x).chunk(2)
            total += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_weighed_sum_of_its_experts_whatever_the_others_are(divide: bool, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    router, gate_up, down, hidden = (
        (torch.randn(*shape, generator=generator) * scale).to(dtype)
        for shape, scale in (((7, H), 0.3), ((7, 2 * F, H), 0.2), ((7, H, F), 0.2), ((40, H), 1.0))
    )
    changes = {"num_experts_per_tok": 3, "norm_topk_prob": divide}
    spec = spec_of(hf_model("qwen3_moe").config.to_dict() | changes, where="tiny")
    experts = Experts(spec, router, gate_up.flatten(0, 1), down.flatten(0, 1))
    for linear in experts.linears():
        linear.pack()
    found = experts(hidden)
    wanted = slow(hidden, router, gate_up, down, per_token=3, divide=divide)
    atol = 2e-5 if dtype is torch.float32 else 0.1  # 8 bits, through two products of values up to 10
    torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=1e-2 if dtype is torch.bfloat16 else 0.0)
    if dtype is torch.float32:  # to the bit, as with packed weights on this CPU
        for rows in (slice(0, 8), slice(16, 40), torch.randperm(40, generator=generator)):
            assert torch.equal(experts(hidden[rows]), found[rows])


def test_every_product_has_a_multiple_of_the_rows_that_make_results_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    product = Linear.__call__

    def counted(linear: Linear, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return product(linear, hidden)

    monkeypatch.setattr(Linear, "__call__", counted)
    spec = spec_of(hf_model("qwen3_moe").config.to_dict(), where="tiny")
    count, generator = spec.num_experts, torch.Generator().manual_seed(3)
    router, gate_up, down, hidden = (
        torch.randn(*shape, generator=generator) for shape in ((count, H), (count * 2 * F, H), (count * H, F), (24, H))
    )
    Experts(spec, router, gate_up, down)(hidden)
    assert len(seen) > 3
    assert not [rows for rows in seen if rows % ROW_STEP]


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("qwen3_moe", ParallelConfig(tp=2, dp=2, etp=2)),
        ("qwen3_moe", ParallelConfig(tp=2, pp=2, dp=7, ep=7, etp=2)),
        ("mixtral", ParallelConfig(tp=4, pp=2, layers_per_stage=(1, 1), etp=4)),
        ("mixtral", ParallelConfig(tp=1, dp=5, ep=5)),
    ],
)
def test_weights_from_any_expert_layout_answer_like_transformers(name: str, parallel: ParallelConfig) -> None:
    model = hf_model(name)
    spec, full = spec_of(model.config.to_dict(), where="tiny"), hub_weights(model)
    src = megatron_layout(spec, parallel, head=Head.LM, dtype="float32")
    for tp in (1, 2):
        engine = make_engine(model)
        dst = engine.layout() if tp == 1 else native_layout(spec, tp=2, dp=2, first_rank=1, dtype="float32")
        plan = make_plan(src, dst, Topology.blocks(max(*src.ranks, *dst.ranks) + 1, ranks_per_node=4))
        assert certify(plan).ratio == 1.0
        dst_params = {rank: empty_params(dst, rank, fill=torch.nan) for rank in plan.ranks}
        if tp == 1:
            real = {0: engine.params()}
            dst_params |= real
            for piece in dst.holdings(0):  # the start's weights are gone
                real[0][piece.param][piece.param_box(piece.box).slices] = torch.nan
        run_plan(plan, {r: filled_params(src, r, full) for r in plan.ranks}, dst_params, bucket_bytes=3000)
        for rank in dst.ranks:
            for piece in dst.holdings(rank):
                landed = dst_params[rank][piece.param][piece.param_box(piece.box).slices]
                assert torch.equal(landed, full[piece.tensor][piece.box.slices]), piece.tensor
        if tp == 1:
            engine.weights_updated(1)
            batch, greedy = prompts((9, 4)), SamplingConfig(temperature=0.0, max_new_tokens=5)
            found, wanted = (one.generate(batch, greedy) for one in (engine, make_engine(model)))
            assert torch.equal(found.responses.values, wanted.responses.values)
