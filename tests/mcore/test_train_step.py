"""What a step does when gradients are not finite, when there are no rows, and when updates are too small for bf16."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head
from rlhf.mcore.groups import make_groups
from rlhf.mcore.load import draw_weights
from rlhf.mcore.lr_schedule import learning_rate
from rlhf.mcore.model import MegatronModel, build_model
from rlhf.mcore.optimizer import Optimizer, build_optimizer
from rlhf.mcore.params import local_params
from rlhf.mcore.train_step import LossFn, StepReport, train_step
from tests.harness.ranks import run_ranks
from tests.mcore.test_train_parity import Minibatch, make_minibatches, make_spec

OPTIM = OptimConfig(lr=1e-3, warmup_steps=4, weight_decay=0.0, clip_grad=1.0)


def _model(factory: GroupFactory, dtype: str, optim: OptimConfig) -> tuple[MegatronModel, Optimizer]:
    spec, parallel = make_spec("qwen3", tied=True), ParallelConfig(dp=2)
    groups = make_groups(parallel, factory)
    model = build_model(
        spec,
        ModelConfig(path="none", init="random", dtype=dtype),
        parallel,
        groups,
        head=Head.LM,
        device=torch.device("cpu"),
        seed=1,
        trainable=True,
    )
    draw_weights(model)
    return model, build_optimizer(model, optim)


def _rows() -> Minibatch:
    """The first minibatch's even rows on dp rank 0, its odd ones on dp rank 1."""
    batch = make_minibatches()[0]
    return batch.select(torch.arange(dist.get_rank(), len(batch), 2))


def _mean_logprob(scale: float) -> LossFn:
    def loss(outputs, rows: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        total = -outputs.logprobs.sum()
        return total * scale / 67, {"tokens": torch.tensor(float(len(outputs.logprobs)))}

    return loss


def _step(
    model: MegatronModel, optimizer: Optimizer, rows: Minibatch, scale: float = 1.0, *, counts: bool = True
) -> StepReport:
    return train_step(model, optimizer, rows, _mean_logprob(scale), microbatch_tokens=50, counts=counts)


def _check_not_finite_is_skipped(factory: GroupFactory) -> None:
    model, optimizer = _model(factory, "float32", OPTIM)
    first = _step(model, optimizer, _rows())
    assert first.stats == {"tokens": 67.0}
    before = {name: param.detach().clone() for name, param in local_params(model).items()}
    for bad in (math.nan, math.inf):
        report = _step(model, optimizer, _rows(), scale=bad if dist.get_rank() == 1 else 1.0)
        assert report.skipped  # on both ranks, though only one saw it
        assert not math.isfinite(report.grad_norm)
    for name, param in local_params(model).items():
        assert torch.equal(param, before[name]), name
    after = _step(model, optimizer, _rows())
    assert not after.skipped
    assert math.isfinite(after.grad_norm)
    assert after.lr == learning_rate(OPTIM, 1)  # the schedule did not move in between
    assert (optimizer.steps_done, optimizer.steps_skipped) == (2, 2)


def _check_no_rows_anywhere_is_a_step_of_nothing(factory: GroupFactory) -> None:
    model, optimizer = _model(factory, "float32", OPTIM)
    before = {name: param.detach().clone() for name, param in local_params(model).items()}
    report = _step(model, optimizer, _rows().select(torch.tensor([], dtype=torch.int64)))
    assert report.stats == {"tokens": 0.0}
    assert report.grad_norm == 0.0
    assert report.clip_factor == 1.0
    for name, param in local_params(model).items():
        assert torch.equal(param, before[name]), name


def _check_a_step_in_which_nothing_counts_leaves_no_trace(factory: GroupFactory) -> None:
    """With momentum and decay at work, a run with such a step in it is the run without, to the bit."""
    optim = OptimConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)
    (with_it, optimizer), (without, other) = (_model(factory, "float32", optim) for _ in range(2))
    _step(with_it, optimizer, _rows())
    report = _step(with_it, optimizer, _rows(), scale=0.0, counts=False)
    assert (report.skipped, report.grad_norm, report.lr) == (True, 0.0, learning_rate(optim, 1))
    assert report.stats == {"tokens": 67.0}
    assert optimizer.steps_done == 1
    last = _step(with_it, optimizer, _rows())
    _step(without, other, _rows())
    assert _step(without, other, _rows()) == last
    for name, param in local_params(with_it).items():
        assert torch.equal(param, local_params(without)[name]), name


def _check_bf16_masters_keep_small_steps(factory: GroupFactory) -> None:
    # Norm weights start at 1, where bf16 numbers lie 1/128 (above) and 1/256 (below) apart: a step of 1e-3 rounds
    # away if it is not kept in fp32. After 8 steps of about one size, those with a steady gradient are 8e-3 away.
    optim = OptimConfig(lr=1e-3, clip_grad=0.0)
    model, optimizer = _model(factory, "bfloat16", optim)
    wide, wide_optimizer = _model(factory, "float32", optim)
    norm = "decoder.final_layernorm.weight"
    assert (local_params(model)[norm] == 1.0).all()
    for step in range(8):
        ours, theirs = _step(model, optimizer, _rows()), _step(wide, wide_optimizer, _rows())
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)  # 8 bits through four layers
        if step == 0:
            assert (local_params(model)[norm] == 1.0).all()  # one step alone is below bf16's resolution
    moved, wide_moved = (local_params(m)[norm].float() - 1.0 for m in (model, wide))
    assert local_params(model)[norm].dtype == torch.bfloat16
    assert wide_moved.abs().max() > 7e-3
    # rounding to the nearest bf16 errs by 1/256; Adam's sign-like steps differ where the gradient is near zero
    assert (moved - wide_moved).abs().median() < 1 / 256
    assert (moved != 0).float().mean() > 0.5


def _checks() -> None:
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    _check_not_finite_is_skipped(factory)
    _check_no_rows_anywhere_is_a_step_of_nothing(factory)
    _check_a_step_in_which_nothing_counts_leaves_no_trace(factory)
    _check_bf16_masters_keep_small_steps(factory)


@pytest.mark.dist
def test_steps_of_bad_gradients_of_no_rows_and_of_bf16() -> None:
    run_ranks(2, _checks)
