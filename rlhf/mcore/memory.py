"""Bytes that a Megatron model holds on one rank, from spec and layout alone; makes no tensor.

As Megatron-Core's distributed optimizer has it: parameters that are trained and their fp32 gradients lie in one buffer
each (of each model chunk), every parameter from a multiple of 64 elements on; a dp rank keeps the optimizer's state
for its share of it. Experts have buffers of their own, shared over the ranks that hold the same experts.
Left out: where gradients are reduced during the backward pass, the first chunk's buffer has a bucket for each 40
million elements, each padded by fewer than 128 dp elements.
"""

from collections.abc import Set
from dataclasses import dataclass
from math import ceil, lcm, prod

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import Head, ModelSpec
from rlhf.mcore.groups import expert_grid
from rlhf.mcore.layout import EMBEDDING, EXPERTS, OUTPUT, frozen_params, param_shapes
from rlhf.reshard.layout import ITEM_BYTES

_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_GRAD_BYTES = _MASTER_BYTES = 4
_MOMENT_BYTES = 8
"""Both of Adam's, in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """What one rank holds of one model, in bytes but for the first. Activations are not among it."""

    parameters: int
    """Elements, padding of the vocabulary included."""
    weights: int
    gradients: int
    """0 for a frozen model."""
    optimizer: int
    """Moments, and fp32 masters of bf16 weights; at most this, since the share's padding needs none."""

    @property
    def total(self) -> int:
        """Sum of the bytes."""
        return self.weights + self.gradients + self.optimizer


def model_bytes(
    spec: ModelSpec,
    parallel: ParallelConfig,
    *,
    head: Head,
    dtype: str,
    trainable: bool,
    stage: int,
    frozen: Set[str] = frozenset(),
) -> ModelBytes:
    """Of any rank of a pipeline stage: all hold as much, whichever experts are theirs. `frozen` as in `build_model`."""
    chunks = [param_shapes(spec, parallel, head=head, stage=stage, chunk=chunk) for chunk in range(parallel.vpp)]
    item, parameters = ITEM_BYTES[dtype], sum(prod(shape) for shapes in chunks for shape in shapes.values())
    if not trainable:
        return ModelBytes(parameters=parameters, weights=parameters * item, gradients=0, optimizer=0)
    stays = frozen_params(spec, parallel, head=head, stage=stage, frozen=frozen)
    beside = sum(prod(shapes.pop(name)) for shapes in chunks for name in stays & shapes.keys())
    is_tied_apart = spec.tied_embeddings and head is Head.LM and parallel.pp > 1
    dp, expert_dp = parallel.dp, expert_grid(parallel).size("edp")
    in_own_bucket, buffer, expert_buffer = {EMBEDDING, OUTPUT} if is_tied_apart else set(), 0, 0
    for shapes in chunks:
        experts = {name: shape for name, shape in shapes.items() if EXPERTS in name}
        others = {name: shape for name, shape in shapes.items() if EXPERTS not in name}
        buffer += _buffer_elements(others, dp=dp, in_own_bucket=in_own_bucket)
        expert_buffer += _buffer_elements(experts, dp=expert_dp, in_own_bucket=set())
    state = _MOMENT_BYTES + (_MASTER_BYTES if item < _MASTER_BYTES else 0)
    return ModelBytes(
        parameters=parameters,
        weights=(buffer + expert_buffer + beside) * item,
        gradients=(buffer + expert_buffer) * _GRAD_BYTES,
        optimizer=(buffer // dp + expert_buffer // expert_dp) * state,
    )


def _buffer_elements(shapes: dict[str, tuple[int, ...]], *, dp: int, in_own_bucket: set[str]) -> int:
    """Elements of a chunk's gradient buffer: one bucket, and one for an embedding that two stages share."""
    bucket = lcm(dp, _BUCKET_ALIGNMENT)
    rest = sum(_up(prod(shape), _PARAM_ALIGNMENT) for name, shape in shapes.items() if name not in in_own_bucket)
    shared = [prod(shape) for name, shape in shapes.items() if name in in_own_bucket]
    return _up(rest, bucket) + sum(_up(size, bucket) for size in shared)


def _up(number: int, multiple: int) -> int:
    return ceil(number / multiple) * multiple
