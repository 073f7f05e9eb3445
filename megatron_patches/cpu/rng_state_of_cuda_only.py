"""Fault: the RNG tracker reads and writes the state of the CUDA generator only."""

import torch

from megatron_patches.patch import Patch

_WHY = "reads torch.cuda's generator; without CUDA the host's is the one that dropout draws from"
_DROP_WHEN = "Megatron-Core's RNG tracker knows the device it serves"


def _get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


PATCHES = (
    Patch(
        target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        source_sha="aa26caaa069c",
        replacement=_get_state,
        why=_WHY,
        drop_when=_DROP_WHEN,
    ),
    Patch(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        source_sha="b179c9d95438",
        replacement=_set_state,
        why=_WHY,
        drop_when=_DROP_WHEN,
    ),
)
