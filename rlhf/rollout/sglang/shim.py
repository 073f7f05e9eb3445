"""What SGLang needs on a CPU without its compiled kernels, and how its processes die with the one that began them.

SGLang's modules import two packages that text models on CPUs can do without: `sgl_kernel`, its kernels for some CPUs,
in whose place torch does the work; and `torchvision`, for images, whose plain build does not load beside a CPU build of
torch. Where one cannot be imported, a stand-in lets the imports pass. Imports nothing of SGLang.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

OPTIONAL = ("sgl_kernel", "torchvision")
_PR_SET_PDEATHSIG = 1


class _Nothing(type):
    """Classes that stand for whatever a missing package has: their attributes are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__}: its package is not installed; text models on CPUs do without")


class _StandIn(types.ModuleType):
    """A package, or a module in it, whose every attribute is there and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}", (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See `importlib.abc.Loader`."""
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install_cpu_shim() -> None:
    """Let SGLang import and run on this CPU by torch alone; called before anything imports it.

    AMX is off, also where the CPU has it: its kernels repack the weights.
    """
    torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]
    missing = [name for name in OPTIONAL if not _can_import(name)]
    if "torchvision" in missing:
        from transformers.utils.import_utils import is_torchvision_available  # noqa: PLC0415

        is_torchvision_available()  # transformers remembers the answer, and so does not take the stand-in for it
    sys.meta_path.insert(0, _Finder(missing))


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError):  # not there, or its library does not load beside this torch
        for found in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[found]
        return False
    return True


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, which must be `parent`, dies (the thread that began it)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
