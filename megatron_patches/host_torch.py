"""The `torch` that Megatron's modules see on a machine without CUDA: calls that name the GPU land on the host.

Only the modules that are given this object see it; torch itself stays as it is.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import torch


class HostStream:
    """A CUDA stream or event that has always finished."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: "HostStream | None" = None) -> "HostStream":
        """An event that has happened."""
        return event or HostStream()

    def record(self, _stream: object = None) -> None:
        """Nothing to record."""

    def wait(self, _stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostCuda(ModuleType):
    """`torch.cuda` without a GPU: the host is the device, work is done when it is called, one generator."""

    Stream = HostStream
    Event = HostStream
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    manual_seed = staticmethod(torch.manual_seed)

    @staticmethod
    def current_device() -> torch.device:
        """The host."""
        return torch.device("cpu")

    @staticmethod
    def synchronize(_device: object = None) -> None:
        """Nothing to wait for."""

    @staticmethod
    def empty_cache() -> None:
        """No cache to empty."""

    @staticmethod
    def stream(_stream: object) -> nullcontext[None]:
        """Context that changes nothing."""
        return nullcontext()

    @staticmethod
    def current_stream(_device: object = None) -> HostStream:
        """A stream that has finished."""
        return HostStream()

    default_stream = current_stream

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with device "cuda" read as the host."""

    @functools.wraps(factory)
    def make(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class HostTorch(ModuleType):
    """`torch`, but for `cuda` and for factories with device="cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = HostCuda("torch.cuda")
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
            setattr(self, name, _on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


HOST_TORCH = HostTorch()
"""The one instance, so that a shim can tell that it is in place."""
