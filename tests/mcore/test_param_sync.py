"""With gradients and weights sent while passes run: the same numbers to the bit, and no reader that sees old weights.

The other model of each pair sends them at the end of the step. Gradients are not clipped, for the norm is summed in
another order where the buckets are others.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file
from torch import Tensor

from rlhf.checkpoint.hf_export import export_hf
from rlhf.config.model import ModelConfig, OptimConfig
from rlhf.config.parallel import ParallelConfig
from rlhf.dist.groups import GroupFactory
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore import model as model_module
from rlhf.mcore.groups import make_groups
from rlhf.mcore.layer_spec import prepare_megatron
from rlhf.mcore.layout import megatron_layout, param_shapes
from rlhf.mcore.load import draw_weights
from rlhf.mcore.model import MegatronModel, build_model, head_weight
from rlhf.mcore.optimizer import Optimizer, build_optimizer
from rlhf.mcore.params import current_params, local_params
from rlhf.mcore.score import score_logprobs
from rlhf.mcore.train_step import StepReport, train_step
from rlhf.reshard.topology import Topology
from rlhf.reshard.weight_sync import WeightSync
from rlhf.trainers.policy_sync import PolicySync
from tests.harness.ranks import run_ranks
from tests.mcore.check_gradients import forbid_parallel_state
from tests.mcore.test_moe_parity import moe_spec
from tests.mcore.test_train_parity import _loss, make_minibatches, make_spec

CASES = (
    (make_spec("qwen2", tied=False), ParallelConfig(tp=2, dp=2)),  # the head's weight in a bucket of its own
    (make_spec("llama", tied=True, num_layers=6), ParallelConfig(pp=2, vpp=3, dp=2)),
    (moe_spec(), ParallelConfig(dp=4, ep=2)),  # experts' gradients are summed over two ranks, the others' over four
)
BUCKET_ELEMENTS = 600
"""Less than the untied head's 648, which then has a bucket to itself; by default Megatron's hold 40 million."""
OPTIM = OptimConfig(lr=0.02, clip_grad=0.0)
OVERLAPPED = replace(OPTIM, overlap_grad_reduce=True, overlap_param_gather=True)


class Destination:
    """Stands in for an engine: a full set of parameters in another layout."""

    def __init__(self, spec: ModelSpec, parallel: ParallelConfig) -> None:
        shapes = param_shapes(spec, parallel, head=Head.LM, stage=0)
        self._params = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.version = -1

    def params(self) -> Mapping[str, Tensor]:
        return self._params

    def wake_weights(self) -> None:
        """Nothing is ever given back."""

    def weights_updated(self, policy_version: int) -> None:
        self.version = policy_version

    def wake(self) -> None:
        """As above."""


class Pair:
    """Two models of one layout and seed: plain, and with overlapped communication."""

    def __init__(self, spec: ModelSpec, parallel: ParallelConfig, factory: GroupFactory) -> None:
        self.groups = make_groups(parallel, factory)
        self.everyone = factory.device_group([tuple(range(dist.get_world_size()))])
        self.plain, self._plain_optimizer = self._made(spec, parallel, OPTIM)
        self.overlapped, self._optimizer = self._made(spec, parallel, OVERLAPPED)

    def _made(self, spec: ModelSpec, parallel: ParallelConfig, optim: OptimConfig) -> tuple[MegatronModel, Optimizer]:
        model = build_model(
            spec,
            ModelConfig(path="none", init="random"),
            parallel,
            self.groups,
            head=Head.LM,
            device=torch.device("cpu"),
            seed=1,
            trainable=True,
            overlap_grad_reduce=optim.overlap_grad_reduce,
            overlap_param_gather=optim.overlap_param_gather,
        )
        draw_weights(model)
        return model, build_optimizer(model, optim)

    def step(self, number: int) -> None:
        """The same step of both; all rows of the last minibatch on one dp rank, so that the other runs dummies."""
        batch = make_minibatches()[number]
        rows, dp_rank = torch.arange(len(batch)), self.groups.dp_rank
        rows = batch.select(rows[rows % 2 == dp_rank] if number < 2 else rows[: len(rows) if dp_rank == 0 else 0])

        def taken(model: MegatronModel, optimizer: Optimizer) -> StepReport:
            return train_step(model, optimizer, rows, _loss(number), microbatch_tokens=23)

        one, two = taken(self.plain, self._plain_optimizer), taken(self.overlapped, self._optimizer)
        assert two == replace(one, grad_norm=pytest.approx(one.grad_norm, rel=1e-6))

    def scores(self, model: MegatronModel) -> Tensor | None:
        rows = make_minibatches()[0].sequences
        scored = score_logprobs(model, rows, microbatch_tokens=40, temperature=1.0, with_entropy=False)
        return None if scored is None else scored[0].values

    def synced(self, model: MegatronModel, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What another layout holds after a sync from these parameters."""
        parallel = ParallelConfig(tp=2, dp=2)
        engine = Destination(model.spec, parallel)
        sync = WeightSync(
            megatron_layout(model.spec, model.parallel, head=Head.LM, dtype="float32"),
            megatron_layout(model.spec, parallel, head=Head.LM, dtype="float32"),
            topology=Topology((0,) * dist.get_world_size()),
            group=self.everyone,
        )
        PolicySync(sync, actor_params=lambda: params, engine=engine).update_weights(policy_version=3)
        assert engine.version == 3
        return engine.params()


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """To the bit."""
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def buckets_of(chunk: DistributedDataParallel) -> list:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def move_storage(model: MegatronModel) -> None:
    """Give the weights' memory back and take other memory, as an offload does."""
    for chunk in model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            kept = buffer.param_data.clone()
            size = buffer.param_data.untyped_storage().nbytes()
            buffer.param_data.untyped_storage().resize_(0)
            buffer.param_data.untyped_storage().resize_(size)
            buffer.param_data.copy_(kept)


def check_pair(pair: Pair, folder: Path) -> None:
    plain, overlapped = pair.plain, pair.overlapped
    buckets = [bucket for chunk in overlapped.chunks for bucket in buckets_of(chunk)]
    if not plain.spec.tied_embeddings:
        (of_head,) = (bucket for bucket in buckets if head_weight(overlapped) in bucket.params)
        assert len(of_head.params) == 1
    assert len(buckets) > 2 or not pair.groups.is_first_stage

    pair.step(0)
    assert not same(local_params(overlapped), local_params(plain)), "nothing is stale: the test proves nothing"
    assert same(current_params(overlapped), local_params(plain))
    moved = [bucket.param_gather_dispatched for bucket in buckets]
    assert all(moved), "a second sync would send again"

    pair.step(1)
    assert not same(local_params(overlapped), local_params(plain))
    one, two = pair.scores(plain), pair.scores(overlapped)
    assert (one is None and two is None) or torch.equal(one, two)
    assert all(bucket.param_gather_handle is None for bucket in buckets), "read while it was on its way"
    assert same(local_params(overlapped), local_params(plain))

    pair.step(2)
    move_storage(overlapped)
    held = pair.synced(plain, local_params(plain))
    assert not same(pair.synced(overlapped, local_params(overlapped)), held)
    assert same(pair.synced(overlapped, current_params(overlapped)), held)

    pair.step(0)
    for model, name in ((plain, "plain"), (overlapped, "overlapped")):
        export_hf(
            model.spec,
            megatron_layout(model.spec, model.parallel, head=Head.LM, dtype="float32"),
            current_params(model),
            folder / name,
            head=Head.LM,
            source_folder=None,
            group=pair.groups.cpu,
            topology=Topology((0,) * dist.get_world_size()),
        )
    assert same(*(load_file(folder / name / "model.safetensors") for name in ("plain", "overlapped")))


def check_rank(folder: str) -> None:
    prepare_megatron(torch.device("cpu"))
    forbid_parallel_state()
    ddp_config = model_module._ddp_config
    model_module._ddp_config = lambda **flags: replace(ddp_config(**flags), bucket_size=BUCKET_ELEMENTS)
    factory = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=60))
    for number, (spec, parallel) in enumerate(CASES):
        check_pair(Pair(spec, parallel, factory), Path(folder) / str(number))


@pytest.mark.dist
def test_overlapped_weights_are_read_by_nobody_before_they_are_gathered(tmp_path: Path) -> None:
    for number in range(len(CASES)):
        (tmp_path / str(number)).mkdir()
    run_ranks(4, check_rank, str(tmp_path))
