"""Stand-ins that record what is asked of SGLang and of CUDA. Nothing here says what a GPU would do."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Recorder:
    """What was called, in order: (name, what matters of its arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, name: str, told: Any = None) -> None:
        self.calls.append((name, told))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Tokenizer:
    """SGLang's tokenizer manager: everything succeeds at once."""

    def __init__(self, record: Recorder) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        async def answer(asked: Any = None, *_: Any, **__: Any) -> Any:
            self._record(name, getattr(asked, "told", None))
            if name == "flush_cache":
                return SimpleNamespace(success=True, message="")
            return (True, "")

        return answer

    def _get_scheduler_first_token_time(self, *_: Any) -> None:
        return None


class _Asked:
    """Any of SGLang's request types."""

    def __init__(self, **told: Any) -> None:
        self.told = told


class _AskedModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Asked


@contextmanager
def recording_sglang(record: Recorder, *, chosen: dict[str, str] | None = None) -> Iterator[None]:
    """A package `sglang` whose engine records its arguments, and that has chosen these options by itself."""
    found = {"quantization": None, "moe_runner_backend": "auto", **(chosen or {})}

    class Engine:
        def __init__(self, **server_args: Any) -> None:
            record("Engine", server_args)
            self.entry = type(self).run_scheduler_process_func
            self.detokenizers = self._launch_detokenizer_subprocesses(server_args=server_args, port_args=None)
            self.tokenizer_manager = Tokenizer(record)
            self.loop = asyncio.new_event_loop()

    parts = {
        "entrypoints.engine": {"Engine": Engine, "kill_process_tree": record},
        "managers.io_struct": {},
        "managers.tokenizer_manager": {"kill_process_tree": record},
        "runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=SimpleNamespace(moe_runner_backend=found["moe_runner_backend"])),
            "get_model": lambda: SimpleNamespace(quantization=found["quantization"]),
        },
        "utils": {"cpu_has_amx_support": lambda: False},
    }
    packages = ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.managers")
    made = {name: ModuleType(name) for name in packages}
    made["sglang"].__spec__ = ModuleSpec("sglang", None)
    for name, content in parts.items():
        kind = _AskedModule if name == "managers.io_struct" else ModuleType
        made[f"sglang.srt.{name}"] = kind(f"sglang.srt.{name}")
        vars(made[f"sglang.srt.{name}"]).update(content)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class CudaTorch:
    """Enough of `torch` for memory that two processes share on a GPU: host memory, handed over by the same calls."""

    def __init__(self, record: Recorder, *, uuids: tuple[str, ...] = ("GPU-a", "GPU-b")) -> None:
        self._record, self._shared = record, dict[bytes, torch.UntypedStorage]()
        self.cuda = SimpleNamespace(
            device_count=lambda: len(uuids),
            get_device_properties=lambda at: SimpleNamespace(uuid=uuids[getattr(at, "index", at)]),
            current_stream=lambda device: SimpleNamespace(synchronize=lambda: record("synchronize", str(device))),
        )
        self.UntypedStorage = SimpleNamespace(_new_shared_cuda=self._open)

    def empty(self, count: int, *, dtype: torch.dtype, device: Any) -> Any:
        self._record("empty", (count, str(device)))
        whole = torch.empty(count, dtype=dtype)
        return _Whole(whole, self._share) if count else whole

    def _share(self, whole: torch.Tensor) -> tuple[Any, ...]:
        handle = bytes([7, 0, 255, len(self._shared)])
        self._shared[handle] = whole.untyped_storage()
        return (1, handle, whole.untyped_storage().nbytes(), 512, b"\x00counter", 3, b"event", True)

    def _open(self, device: int, handle: bytes, size: int, *rest: Any) -> torch.UntypedStorage:
        self._record("open", (device, handle, size, rest))
        return self._shared[handle]


class _Whole:
    def __init__(self, tensor: torch.Tensor, share: Any) -> None:
        self._tensor, self._share = tensor, share

    def __getitem__(self, part: slice) -> torch.Tensor:
        return self._tensor[part]

    def untyped_storage(self) -> Any:
        return SimpleNamespace(_share_cuda_=lambda: self._share(self._tensor))
