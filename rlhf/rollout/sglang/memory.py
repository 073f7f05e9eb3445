"""Memory of an engine between rollouts: measured from outside; on CPUs given back and taken again in each scheduler.

On GPUs SGLang does that itself, by the same tags. On CPUs it keeps everything, so errands of ours empty the storages of
the tensors and fill them again: the tensors stay the same objects, their contents are lost.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KV_CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's own tags."""
_GIVEN = "rlhf_given_back"
"""Where a scheduler keeps what was given back: by tag, (storage, its size in bytes)."""
_POOLS = ("k_buffer", "v_buffer", "kv_buffer")
"""Where SGLang's pools of keys and values have their tensors."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class GiveBack:
    """An errand on a scheduler: give back memory by tags. Nothing may run there.

    Rotary tables and whatever else is no parameter stay.
    """

    tags: tuple[str, ...]

    def run_in(self, scheduler: Any) -> int:
        """Bytes of the tensors.

        Raises:
            RuntimeError: Requests are running or waiting.
        """
        if not scheduler.is_fully_idle():
            raise RuntimeError("requests are running; needs none, since their keys and values would be lost")
        given = scheduler.__dict__.setdefault(_GIVEN, {})
        for tag in self.tags:
            if tag not in given:
                storages = {one.data_ptr(): one for one in map(Tensor.untyped_storage, _tensors(scheduler, tag))}
                given[tag] = [(storage, storage.nbytes()) for storage in storages.values()]
                for storage, _ in given[tag]:
                    storage.resize_(0)
        ctypes.CDLL(None).malloc_trim(0)
        return sum(size for tag in self.tags for _, size in given[tag])


@dataclass(frozen=True, slots=True)
class TakeAgain:
    """An errand on a scheduler: take again what was given back. It holds zeros, which padding has to hold."""

    tags: tuple[str, ...]

    def run_in(self, scheduler: Any) -> int:
        """Bytes of the tensors."""
        given, taken = scheduler.__dict__.setdefault(_GIVEN, {}), 0
        for tag in self.tags:
            for storage, size in given.pop(tag, ()):
                storage.resize_(size)
                storage.fill_(0)
                taken += size
        pool = _pool(scheduler)
        if KV_CACHE in self.tags and hasattr(pool, "_init_data_ptrs_and_strides"):
            pool._init_data_ptrs_and_strides()  # the memory lies elsewhere now
        return taken


def used_bytes(device: torch.device, pids: Sequence[int]) -> int:
    """Memory in use: of a GPU as a whole (what others do on it counts too), or on CPUs of some processes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return sum(_resident_bytes(pid) for pid in pids)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _pool(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner.token_to_kv_pool


def _tensors(scheduler: Any, tag: str) -> Iterator[Tensor]:
    if tag == WEIGHTS:
        yield from scheduler.tp_worker.model_runner.model.parameters()
        return
    assert tag == KV_CACHE, tag
    pool = _pool(scheduler)
    found = [tensor for name in _POOLS for tensor in getattr(pool, name, ())]
    if not found:
        raise RuntimeError(f"SGLang keeps keys and values in a {type(pool).__name__}, in none of {_POOLS}")
    yield from found
