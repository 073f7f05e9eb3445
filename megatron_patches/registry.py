"""Which patches a machine needs, and putting them in place. Knows nothing of models."""

from megatron_patches.attention import local_attention_refuses_packed, rope_split_per_sequence
from megatron_patches.cpu import (
    cuda_called_unconditionally,
    optimizer_asks_for_cuda_types,
    rng_state_of_cuda_only,
    torch_norm_refuses_sequence_parallel,
)
from megatron_patches.layouts import (
    kv_head_shared_over_global_tp,
    param_groups_gathered_over_world,
    scratch_memory_of_parallel_state,
    tp_group_asked_of_parallel_state,
)
from megatron_patches.mlp import swiglu_is_compiled_or_unfused
from megatron_patches.moe import (
    gloo_refuses_ragged_gather,
    router_asks_for_gemm_of_te,
    split_sizes_stay_tensors_on_host,
)
from megatron_patches.patch import Mend

LAYOUTS: tuple[Mend, ...] = (
    param_groups_gathered_over_world.EDIT,
    scratch_memory_of_parallel_state.PATCH,
    tp_group_asked_of_parallel_state.EDIT,
    kv_head_shared_over_global_tp.EDIT,
)
"""Needed wherever several layouts share a job."""
CPU: tuple[Mend, ...] = (
    *cuda_called_unconditionally.SHIMS,
    *rng_state_of_cuda_only.PATCHES,
    *optimizer_asks_for_cuda_types.EDITS,
    *gloo_refuses_ragged_gather.EDITS,
    split_sizes_stay_tensors_on_host.EDIT,
)
"""Needed where models live on the host."""
LOCAL_LAYERS: tuple[Mend, ...] = (
    torch_norm_refuses_sequence_parallel.PATCH,
    local_attention_refuses_packed.PATCH,
    rope_split_per_sequence.PATCH,
    swiglu_is_compiled_or_unfused.PATCH,
    *router_asks_for_gemm_of_te.EDITS,
)
"""Needed where layers are built without Transformer Engine."""


def choose(*, has_cuda: bool, has_te: bool) -> tuple[Mend, ...]:
    """The patches for a machine, in the order in which they are applied.

    Args:
        has_cuda: Models live on a GPU.
        has_te: Transformer Engine is installed.
    """
    return (*LAYOUTS, *(() if has_cuda else CPU), *(() if has_cuda and has_te else LOCAL_LAYERS))


def apply(mends: tuple[Mend, ...]) -> None:
    """Put patches in place; those that are there already stay.

    Raises:
        PatchError: Megatron-Core is not the one that a patch was written for.
    """
    for mend in mends:
        mend.apply()


def runs_on_host() -> bool:
    """Whether the device shims are in place, so that no model of this process can be on a GPU."""
    return any(shim.in_place for shim in cuda_called_unconditionally.SHIMS)
