"""Two regions of memory that a rank and its scheduler both see, on the host or on one GPU.

Host memory is a file without a name (memfd), whose descriptor travels over the channel: it is in no folder, /dev/shm
among them, and is gone when both processes are. It is reserved when it is made, so that a shortage is an error here and
not a crash while weights arrive.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf.errors import EngineError
from rlhf.reshard.transport import torch_dtype
from rlhf.reshard.windows import NUM_REGIONS

_MIB = 2**20


class Regions(Protocol):
    """Memory of windows, and how to tell another process of it."""

    tensors: tuple[Tensor, ...]
    """Flat, one a region."""

    def told(self) -> dict[str, Any]:
        """What `attach` needs in the other process, as JSON."""

    @property
    def fd(self) -> int | None:
        """An open file that `attach` needs there."""

    def settle(self) -> None:
        """Writes to the regions that were queued on a device are done when this returns."""


class HostRegions:
    """In host memory.

    Raises:
        EngineError: There is not so much memory: what is needed, what is free.
    """

    def __init__(self, elements: int, dtype: str) -> None:
        itemsize = torch_dtype(dtype).itemsize
        size = max(1, NUM_REGIONS * elements * itemsize)
        free = available_bytes()
        if size > free:
            raise EngineError(
                f"rollout.sglang: {NUM_REGIONS} windows need {size / _MIB:,.0f} MiB of shared host memory, "
                f"{free / _MIB:,.0f} MiB are free; needs them beside the model; lower sync.bucket_bytes"
            )
        fd = os.memfd_create("rlhf_windows", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise EngineError(
                f"rollout.sglang: the system refused {size / _MIB:,.0f} MiB of shared host memory ({error.strerror}), "
                f"{free / _MIB:,.0f} MiB are free; lower sync.bucket_bytes"
            ) from error
        self._fd = fd
        self.tensors = _mapped(fd, elements, dtype)
        self._told = {"kind": "host", "elements": elements, "dtype": dtype}

    @property
    def fd(self) -> int:
        """See `Regions.fd`."""
        return self._fd

    def told(self) -> dict[str, Any]:
        """See `Regions.told`."""
        return self._told

    def settle(self) -> None:
        """See `Regions.settle`: nothing is queued on a host."""

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)  # the mapping stays while tensors do


class DeviceRegions:
    """On one GPU, opened in the other process by CUDA's inter-process handles. Never run."""

    def __init__(self, elements: int, dtype: str, device: torch.device) -> None:
        self._device = device
        whole = torch.empty(NUM_REGIONS * elements, dtype=torch_dtype(dtype), device=device)
        self.tensors = tuple(whole[at * elements : (at + 1) * elements] for at in range(NUM_REGIONS))
        shared = whole.untyped_storage()._share_cuda_()
        self._told = {
            "kind": "device",
            "elements": elements,
            "dtype": dtype,
            "uuid": str(torch.cuda.get_device_properties(device).uuid),  # an index means another GPU elsewhere
            "storage": [part.hex() if isinstance(part, bytes) else part for part in shared[1:]],
        }

    @property
    def fd(self) -> None:
        """See `Regions.fd`."""
        return None

    def told(self) -> dict[str, Any]:
        """See `Regions.told`."""
        return self._told

    def settle(self) -> None:
        """See `Regions.settle`."""
        torch.cuda.current_stream(self._device).synchronize()


def make_regions(elements: int, dtype: str, device: torch.device) -> Regions:
    """Regions of so many elements each, where the transport of `device` can receive into them."""
    return DeviceRegions(elements, dtype, device) if device.type == "cuda" else HostRegions(elements, dtype)


def attach(told: Mapping[str, Any], fd: int | None) -> tuple[Tensor, ...]:
    """The regions that another process made. The file may be closed afterwards."""
    elements, dtype = int(told["elements"]), str(told["dtype"])
    if told["kind"] == "host":
        assert fd is not None, "host memory comes with an open file"
        return _mapped(fd, elements, dtype)
    return _opened(told, elements, dtype)


def available_bytes() -> int:
    """Memory that this process may still take: of the host, and of the cgroup around it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def _mapped(fd: int, elements: int, dtype: str) -> tuple[Tensor, ...]:
    kind = torch_dtype(dtype)
    if not elements:
        return (torch.empty(0, dtype=kind),) * NUM_REGIONS
    memory = mmap.mmap(fd, NUM_REGIONS * elements * kind.itemsize)
    whole = torch.frombuffer(memory, dtype=kind)  # holds the mapping
    return tuple(whole[at * elements : (at + 1) * elements] for at in range(NUM_REGIONS))


def _opened(told: Mapping[str, Any], elements: int, dtype: str) -> tuple[Tensor, ...]:
    """Device memory of another process on the GPU that both see. Never run."""
    here = [
        at for at in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(at).uuid) == told["uuid"]
    ]
    if not here:
        raise EngineError(
            f"rollout.sglang: GPU {told['uuid']} of the rank is not visible to its scheduler; needs both on one GPU; "
            "let engines start on the GPU of their first rank"
        )
    shared = [bytes.fromhex(part) if isinstance(part, str) else part for part in told["storage"]]
    storage = torch.UntypedStorage._new_shared_cuda(here[0], *shared)
    kind = torch_dtype(dtype)
    whole = torch.empty(0, dtype=kind, device=f"cuda:{here[0]}").set_(storage)
    return tuple(whole[at * elements : (at + 1) * elements] for at in range(NUM_REGIONS))
