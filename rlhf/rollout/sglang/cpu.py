"""All that is different about SGLang on a CPU: its arguments and variables, what it cannot do, and what it lacks.

SGLang's modules import two packages that text models on CPUs can do without: `sgl_kernel`, its kernels for some CPUs,
in whose place torch does the work; and `torchvision`, for images, whose plain build does not load beside a CPU build of
torch. Where one cannot be imported, a stand-in lets the imports pass. Imports nothing of SGLang.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from rlhf.config.checks import refuse
from rlhf.config.sglang import BY_SEED, SGLangConfig
from rlhf.errors import LayoutError
from rlhf.families.spec import ModelSpec
from rlhf.rollout.sglang.layout import Sizes

OPTIONAL = ("sgl_kernel", "torchvision")
"""Packages that stand-ins take the place of where they cannot be imported."""
MLP_MULTIPLE = 32
"""SGLang pads each rank's share of an MLP to a multiple of this, on CPUs alone."""
ATTENTION = ("auto", "torch_native")
"""Backends that run on a CPU without SGLang's kernels; auto is the second."""
SAMPLING = (BY_SEED, "pytorch")
IDLE = {
    "mem_fraction_static": "rollout.kv_cache_tokens alone says how large the cache is",
    "cuda_graph_max_batch": "there are no CUDA graphs",
    "deterministic": "there are no such kernels; samples are drawn by their seeds all the same",
}
"""Settings for the speed and memory of GPUs, and why they mean nothing on a CPU."""


def cpu_args() -> dict[str, Any]:
    """Server arguments beside those of any device."""
    return {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        # Sizes come from max_total_tokens. SGLang does not start when the machine has lost more than this share of its
        # free memory while weights were loaded, to whomever.
        "mem_fraction_static": 0.95,
    }


def idle_on_cpu(options: SGLangConfig) -> str:
    """Which of the settings that were changed have no effect on a CPU, and why, in a line; "" for none.

    One file is to run on a laptop and on a cluster. So what costs speed or memory alone is told and left out; what
    would change the numbers that come out is refused (`check_cpu_options`).
    """
    plain = SGLangConfig()
    changed = [name for name in IDLE if getattr(options, name) != getattr(plain, name)]
    if not changed:
        return ""
    told = [f"{name}={str(getattr(options, name)).lower()} ({IDLE[name]})" for name in changed]
    return f"rollout.sglang: without effect on a CPU: {', '.join(told)}"


def check_cpu_options(options: SGLangConfig) -> None:
    """Refuse options that SGLang has on GPUs only and that change what is sampled, or its log-probs."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if (given := getattr(options, name)) not in ATTENTION:
            refuse(
                f"rollout.sglang.{name}: {given} given on a CPU, where SGLang's attention is torch's own; needs "
                f"{' or '.join(ATTENTION)}; change it"
            )
    for name, plain in (("sampling_backend", SAMPLING), ("kv_cache_dtype", ("auto",))):
        if (given := getattr(options, name)) not in plain:
            refuse(
                f"rollout.sglang.{name}: {given} given, which SGLang has on GPUs only; needs {' or '.join(plain)} on a "
                "CPU; change it"
            )


def check_cpu_sizes(spec: ModelSpec, sizes: Sizes) -> None:
    """Raise LayoutError where SGLang pads or does not run the model on CPUs, though it does on GPUs."""
    if sizes.ep > 1:
        raise LayoutError(
            f"rollout.sglang.ep: {sizes.ep} given on a CPU, where SGLang's experts do not run apart; needs 1, so that "
            "ranks cut each expert; set rollout.sglang.ep=1"
        )
    what, size = ("moe_ffn_size", spec.moe_ffn_size) if spec.num_experts else ("ffn_size", spec.ffn_size)
    if size % (MLP_MULTIPLE * sizes.tp):
        raise LayoutError(
            f"rollout.tp: {sizes.tp} ranks share {what} = {size} on a CPU, where SGLang pads each share to a multiple "
            f"of {MLP_MULTIPLE}; needs shares that are one; change rollout.tp, or take rollout.engine=native"
        )
    if spec.num_kv_heads % sizes.tp:
        raise LayoutError(
            f"rollout.tp: {sizes.tp} ranks share num_kv_heads = {spec.num_kv_heads} on a CPU, where SGLang adds heads "
            "until it can share them evenly; needs a divisor; change rollout.tp, or take rollout.engine=native"
        )


def cpu_environment(tp: int, *, leader: int, threads: int, cores: list[int]) -> dict[str, str]:
    """Variables of an engine on CPUs: `threads` cores for each of its ranks, beginning after those of earlier ranks.

    SGLang wants to be told the cores; it binds to them where its kernels for CPUs are installed.
    """
    own = [[cores[((leader + rank) * threads + i) % len(cores)] for i in range(threads)] for rank in range(tp)]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, mine)) for mine in own),
        "TORCHDYNAMO_DISABLE": "1",
    }


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
    import torch  # noqa: PLC0415  what is refused is known without it

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
