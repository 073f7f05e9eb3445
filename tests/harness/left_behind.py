"""What a function leaves behind in the process that ran it: put back where that can be, named where it cannot."""

import gc
import multiprocessing.resource_tracker
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp

PACKAGES = ("rlhf", "megatron", "megatron_patches", "tests")
"""Whose modules and classes are put back; a test may set what it likes on them."""
HARMLESS_THREADS = ("console", "tqdm_monitor")
"""A run that is built and never begins leaves the thread that would print its long phases, of which it has none; the
other one belongs to a library's progress bars, and each process has one at most."""
SETTINGS: dict[str, Callable[[], object]] = {
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's grad mode": torch.is_grad_enabled,
    "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "torch's float32 matmul precision": torch.get_float32_matmul_precision,
    "torch's sharing strategy": mp.get_sharing_strategy,
    "torch.compile": lambda: torch.compile,
    "sys.stdout": lambda: sys.stdout,
    "sys.stderr": lambda: sys.stderr,
    "handlers of signals": lambda: [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
}


class Before:
    """The state of this process before a function runs in it; make it once the function's modules are imported."""

    def __init__(self) -> None:
        torch.seed()  # a new process draws its seeds, too
        random.seed()
        np.random.seed()
        self._settings = {name: read() for name, read in SETTINGS.items()}
        self._num_threads = torch.get_num_threads()
        self._threads, self._children = set(threading.enumerate()), set(_children())
        self._names = [(owner, dict(vars(owner))) for module in _modules() for owner in _owners(module)]
        self._modules = set(sys.modules)

    def put_back(self) -> None:
        """Undo what was set on modules and classes, and the number of threads; collect what is garbage.

        A name that is new is removed, unless it is a module's own submodule, which Python binds at its import.
        """
        for owner, names in self._names:
            now = dict(vars(owner))
            for name in now.keys() - names.keys():
                if not (_is_special(name) or isinstance(now[name], ModuleType)):
                    delattr(owner, name)
            for name, value in names.items():
                if now.get(name, self) is not value and not _is_special(name):
                    setattr(owner, name, value)
        torch.set_num_threads(self._num_threads)
        gc.collect()

    def left(self, *, patience_s: float = 5.0) -> list[str]:
        """What cannot be put back: changed settings, threads and child processes, each as words for an error."""
        found = [
            f"{name}: {now}, was {self._settings[name]}"
            for name, read in SETTINGS.items()
            if (now := read()) != self._settings[name]
        ]
        until = time.monotonic() + patience_s
        while (alive := self._alive()) and time.monotonic() < until:
            time.sleep(0.02)
        return [*found, *alive]

    def patched_imports(self) -> list[str]:
        """Names of modules imported meanwhile that hold a test's function: what they held before is not known."""
        return [
            f"{module.__name__}.{name}"
            for module in _modules()
            if module.__name__ not in self._modules and not module.__name__.startswith("tests.")
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) and str(value.__module__).startswith("tests.")
        ]

    def _alive(self) -> list[str]:
        threads = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        found = [f"thread {name}" for name in threads if name not in HARMLESS_THREADS]
        return found + [f"child process {pid}" for pid in _children() if pid not in self._children]


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and isinstance(module, ModuleType)
    ]


def _owners(module: ModuleType) -> list[ModuleType | type]:
    """The module and the classes that it defines."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return [module, *(found for found in classes if found.__module__ == module.__name__)]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _children() -> list[int]:
    """Process ids of the children that run, without multiprocessing's own tracker of resources."""
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    return [child.pid for child in psutil.Process().children() if child.pid != tracker and _is_alive(child)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
