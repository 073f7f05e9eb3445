"""Three optimizer steps in many layouts against one process in float64.

Loss, global gradient norm, clip factor and every weight agree over layouts and token budgets, with very uneven rows,
tied embeddings, and a minibatch whose rows all lie on one dp rank.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.data.batch import Sequences
from rlhf.data.ragged import Ragged
from rlhf.data.table import Table
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import make_groups
from rlhf.mcore.layer_spec import prepare_megatron
from rlhf.mcore.layout import megatron_layout
from rlhf.mcore.load import load_weights
from rlhf.mcore.lr_schedule import learning_rate
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.outputs import PolicyOutputs, ValueOutputs
from rlhf.mcore.params import local_params
from rlhf.mcore.score import score_logprobs, score_values
from rlhf.mcore.train_step import train_step
from tests.harness.ranks import run_ranks
from tests.mcore import float64_reference as reference
from tests.mcore.check_gradients import forbid_parallel_state

TEMPERATURE = 0.8
# eps far above fp32 noise in a gradient (about 1e-7 of its size), or Adam turns the noise of a gradient that happens
# to be near zero into a step of full size.
OPTIM = OptimConfig(lr=0.02, warmup_steps=2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-3, clip_grad=0.5)

# (prompt, response) tokens of each row of three minibatches; the longest is 43 times the shortest.
SHAPES = (
    ((3, 40), (1, 1), (17, 5), (2, 9), (30, 2), (1, 3), (6, 7)),
    ((2, 2), (9, 31), (1, 1), (1, 1)),
    ((5, 12), (8, 8), (1, 20)),
)
ONLY_ON_DP_0 = 2
"""Minibatch whose rows all lie on dp rank 0."""


def make_spec(family: str, *, tied: bool, num_layers: int = 4) -> ModelSpec:
    return ModelSpec(
        family=family,
        vocab_size=53,
        hidden_size=24,
        ffn_size=28,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=10,
        norm_eps=1e-6,
        rope_theta=500.0,
        rope_scaling=None,
        max_positions=128,
        tied_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


@dataclass(frozen=True, slots=True)
class Minibatch(Table):
    """Rows with a weight per response token."""

    sequences: Sequences
    weights: Ragged


def make_minibatches() -> list[Minibatch]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, shapes in enumerate(SHAPES):
        rows = [torch.randint(0, 53, (prompt + response,), generator=generator) for prompt, response in shapes]
        lengths = torch.tensor([response for _, response in shapes])
        weights = torch.randn(int(lengths.sum()), generator=generator)
        ids = torch.arange(len(rows)) + 100 * number
        sequences = Sequences(ids, Ragged.of(rows, dtype=torch.int64), lengths)
        found.append(Minibatch(sequences, Ragged(weights, lengths)))
    return found


def _num_tokens(number: int) -> int:
    return sum(response for _, response in SHAPES[number])


def _token_losses(weights: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Curved in the log-prob, and with an entropy bonus, so that a factor in the wrong place shows."""
    return weights * logprobs + 0.05 * logprobs.square() - 0.3 * entropy


def _value_losses(weights: Tensor, values: Tensor) -> Tensor:
    return (values - weights).square()


# --- the reference ---


@dataclass
class Expected:
    """What the reference found, in float64."""

    start: dict[str, Tensor]
    outputs: list[list[Tensor]]
    """Log-probs (or values) of each row of each minibatch, under the starting weights."""
    losses: list[float]
    norms: list[float]
    factors: list[float]
    end: dict[str, Tensor]


def _expect(spec: ModelSpec, head: Head, frozen: frozenset[str]) -> Expected:
    weights = reference.random_weights(spec, head, seed=3)
    start = {name: weight.clone() for name, weight in weights.items()}
    adamw = reference.AdamW((OPTIM.beta1, OPTIM.beta2), OPTIM.eps, OPTIM.weight_decay, OPTIM.clip_grad)
    found = Expected(start, [], [], [], [], weights)

    def outputs(tokens: Tensor, response: int) -> tuple[Tensor, ...]:
        if head is Head.VALUE:
            return (reference.values(weights, spec, tokens, response),)
        return reference.logprobs_and_entropy(weights, spec, tokens, response, TEMPERATURE)

    for batch in make_minibatches():
        rows = zip(batch.sequences.tokens.rows(), batch.sequences.response_lengths.tolist(), strict=True)
        found.outputs.append([outputs(tokens, response)[0] for tokens, response in rows])
    for number, batch in enumerate(make_minibatches()):
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        weights.update(leaves)
        total = torch.zeros((), dtype=torch.float64)
        for i, tokens in enumerate(batch.sequences.tokens.rows()):
            row_weights = batch.weights.rows()[i].double()
            losses = _value_losses if head is Head.VALUE else _token_losses
            total = total + losses(row_weights, *outputs(tokens, len(row_weights))).sum() / _num_tokens(number)
        trained = {name: leaf for name, leaf in leaves.items() if name not in frozen}
        grads = dict(
            zip(trained, torch.autograd.grad(total, list(trained.values()), materialize_grads=True), strict=True)
        )
        weights.update({name: weight.detach() for name, weight in leaves.items()})
        norm, factor = adamw.step({name: weights[name] for name in trained}, grads, learning_rate(OPTIM, number))
        found.losses.append(float(total.detach()))
        found.norms.append(norm)
        found.factors.append(factor)
    return found


# --- the same on Megatron ---


@dataclass(frozen=True)
class Case:
    """One layout and the token budget of each step."""

    parallel: ParallelConfig
    budgets: tuple[int, int, int]
    recompute: str = "none"
    dtype: str = "float32"
    family: str = ""
    """Of a policy; empty: tied qwen3 where there is pp or dp, else qwen2."""
    frozen: frozenset[str] = frozenset()

    def tolerance(self, *, fp32: float, bf16: float) -> float:
        """What rounding may do to a number."""
        return fp32 if self.dtype == "float32" else bf16


def _layout(tp: int, pp: int, dp: int, *, vpp: int = 1, first: int = 0, stages: tuple[int, ...] = ()) -> ParallelConfig:
    return ParallelConfig(tp=tp, pp=pp, vpp=vpp, dp=dp, first_rank=first, layers_per_stage=stages)


SMALL, LARGE = 23, 4096  # tokens: the longest row has 43; all of a minibatch has at most 127
POLICY_CASES = (
    Case(_layout(2, 1, 1), (SMALL, LARGE, SMALL)),
    Case(_layout(1, 1, 2, first=2), (LARGE, SMALL, SMALL)),
    Case(_layout(1, 2, 1), (SMALL, SMALL, LARGE)),
    Case(_layout(1, 2, 1, first=2, stages=(3, 1)), (LARGE, LARGE, SMALL)),
    Case(_layout(2, 2, 1), (LARGE, SMALL, SMALL), recompute="full"),
    Case(_layout(1, 2, 2), (SMALL, LARGE, LARGE)),
    Case(_layout(2, 1, 2), (60, 60, 60)),
    Case(_layout(1, 3, 1, first=1, stages=(1, 2, 1)), (60, SMALL, LARGE)),
    Case(_layout(2, 2, 1), (SMALL, LARGE, SMALL), dtype="bfloat16"),
    # more ranks than KV heads: rank 0 of a group has q alone, the other one the rest of q, k and v
    Case(_layout(4, 1, 1), (SMALL, LARGE, SMALL)),
    Case(_layout(4, 1, 1), (LARGE, SMALL, SMALL), recompute="full", family="qwen3"),
)
VALUE_CASES = (
    Case(_layout(2, 1, 1), (SMALL, LARGE, SMALL)),
    Case(_layout(1, 1, 2, first=2), (SMALL, LARGE, LARGE)),
    Case(_layout(2, 2, 1), (LARGE, SMALL, SMALL)),
    Case(_layout(4, 1, 1), (LARGE, SMALL, SMALL)),
    Case(_layout(1, 2, 1, vpp=2, first=1), (SMALL, LARGE, SMALL)),
)
CHUNKED_CASES = (  # tied, 6 layers
    Case(_layout(1, 2, 2, vpp=3), (SMALL, LARGE, LARGE)),
    Case(_layout(2, 2, 1, vpp=2, stages=(1, 2, 1, 2)), (LARGE, SMALL, SMALL), recompute="full"),
    Case(_layout(1, 3, 1, vpp=2, first=1), (60, SMALL, LARGE)),
)


def _mine(batch: Minibatch, number: int, dp_rank: int, dp: int) -> Tensor:
    """Rows of a dp rank; interleaved, but for the minibatch that lies on one rank."""
    rows = torch.arange(len(batch))
    return rows[rows % dp == dp_rank] if number != ONLY_ON_DP_0 else rows[: len(rows) if dp_rank == 0 else 0]


def _loss(number: int):
    def loss(outputs: PolicyOutputs | ValueOutputs, rows: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(outputs, ValueOutputs):
            total = _value_losses(rows.weights.values, outputs.values).sum()
        else:
            total = _token_losses(rows.weights.values, outputs.logprobs, outputs.entropy).sum()
        value = total / _num_tokens(number)
        return value, {"loss": value, "rows": torch.tensor(float(len(rows)))}

    return loss


def _compare_weights(model, spec, head, case: Case, expected: Expected, rank: int) -> None:
    layout = megatron_layout(spec, case.parallel, head=head, dtype=case.dtype)
    # Three steps of lr 0.02; fp32 gradients err by about 1e-6 of the clipped norm 0.5, over eps 1e-3 at worst. With 8
    # bits an element whose gradient is near zero may take each of three steps the other way; most stay within rounding.
    atol = case.tolerance(fp32=2e-5, bf16=0.12)
    params = local_params(model)
    held = layout.holdings(rank)
    assert {block.param for block in held} == set(params)
    for block in held:
        ours = params[block.param][block.param_box(block.box).slices]
        theirs = expected.end[block.tensor][block.box.slices]
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=atol, msg=lambda m: f"{block.tensor}: {m}")  # noqa: B023
        assert (ours.double() - theirs).abs().median() < case.tolerance(fp32=1e-5, bf16=4e-3), block.tensor


def run_case(case: Case, spec: ModelSpec, head: Head, folder: Path, factory: GroupFactory) -> MegatronModel | None:
    """Score and train on this rank's part of the case and compare; the model after it, None outside its pool."""
    parallel = case.parallel
    groups = make_groups(parallel, factory)
    if not groups.is_member:
        return None
    expected: Expected = torch.load(folder / "expected.pt", weights_only=False)
    config = ModelConfig(path=str(folder), recompute=case.recompute, dtype=case.dtype)
    model = build_model(
        spec,
        config,
        parallel,
        groups,
        head=head,
        device=torch.device("cpu"),
        seed=1,
        trainable=True,
        frozen=case.frozen,
    )
    load_weights(model, folder)
    optimizer = build_optimizer(model, OPTIM)
    batches = make_minibatches()
    for number, batch in enumerate(batches):
        index = _mine(batch, number, groups.dp_rank, parallel.dp)
        rows = batch.select(index).sequences
        budget = case.budgets[number]
        if head is Head.VALUE:
            scored = score_values(model, rows, microbatch_tokens=budget)
        else:
            both = score_logprobs(model, rows, microbatch_tokens=budget, temperature=TEMPERATURE, with_entropy=True)
            scored = None if both is None else both[0]
        assert (scored is None) == (not groups.is_last_stage)
        if scored is not None:
            want = [expected.outputs[number][i] for i in index.tolist()]
            assert scored.lengths.tolist() == [len(row) for row in want]
            # fp32 through four layers: about 1e-6 of values up to 20
            atol, all_rows = case.tolerance(fp32=2e-5, bf16=0.2), torch.cat([torch.zeros(0).double(), *want])
            torch.testing.assert_close(scored.values.double(), all_rows, rtol=1e-5, atol=atol)
    for number, batch in enumerate(batches):
        rows = batch.select(_mine(batch, number, groups.dp_rank, parallel.dp))
        report = train_step(
            model, optimizer, rows, _loss(number), microbatch_tokens=case.budgets[number], temperature=TEMPERATURE
        )
        assert report.stats["rows"] == len(batch)
        rel = case.tolerance(fp32=1e-5, bf16=0.03)  # the loss is a sum of 61 terms, some of either sign
        loss, far = expected.losses[number], case.tolerance(fp32=0.0, bf16=0.05)
        assert report.stats["loss"] == pytest.approx(loss, rel=rel, abs=far)
        assert report.grad_norm == pytest.approx(expected.norms[number], rel=rel)
        assert report.clip_factor == pytest.approx(expected.factors[number], rel=rel)
        assert report.lr == learning_rate(OPTIM, number)
        assert not report.skipped
    _compare_weights(model, spec, head, case, expected, groups.rank)
    return model


def _run_cases(folder: str) -> None:
    prepare_megatron(torch.device("cpu"))
    forbid_parallel_state()
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for case in POLICY_CASES:
        name = case.family or ("qwen3" if case.parallel.pp > 1 or case.parallel.dp > 1 else "qwen2")
        run_case(case, make_spec(name, tied=name == "qwen3"), Head.LM, Path(folder) / name, factory)
    for case in CHUNKED_CASES:
        run_case(case, make_spec("llama", tied=True, num_layers=6), Head.LM, Path(folder) / "deep", factory)
    for case in VALUE_CASES:
        run_case(case, make_spec("llama", tied=False), Head.VALUE, Path(folder) / "llama", factory)


def prepare(folder: Path, spec: ModelSpec, head: Head, frozen: frozenset[str] = frozenset()) -> Expected:
    """A checkpoint and what becomes of it, in a new folder."""
    folder.mkdir()
    expected = _expect(spec, head, frozen)
    save_file({name: weight.float() for name, weight in expected.start.items()}, folder / "model.safetensors")
    torch.save(expected, folder / "expected.pt")
    return expected


@pytest.mark.dist
def test_every_layout_trains_like_float64_on_one_process(tmp_path):
    policies = [
        prepare(tmp_path / "qwen3", make_spec("qwen3", tied=True), Head.LM),
        prepare(tmp_path / "qwen2", make_spec("qwen2", tied=False), Head.LM),
        prepare(tmp_path / "llama", make_spec("llama", tied=False), Head.VALUE),
        prepare(tmp_path / "deep", make_spec("llama", tied=True, num_layers=6), Head.LM),
    ]
    for expected in policies:  # the comparison can fail: weights moved far beyond its tolerance, and clipping acted
        assert min(expected.factors) < 0.9
        for name, weight in expected.end.items():
            assert (weight - expected.start[name]).abs().max() > 1e-3, name
    run_ranks(4, _run_cases, str(tmp_path))
