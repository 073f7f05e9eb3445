"""What the numbers were measured on."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = ("torch", "transformers", "megatron-core")
"""Libraries whose versions matter."""


def describe(versions: Mapping[str, str]) -> dict[str, object]:
    """The machine now: processor, cores that this process may use, memory, load, versions.

    `versions`: of what else was measured, by name.
    """
    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": num_cores(),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {**{name: _version(name) for name in OURS}, **versions},
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _field(file: str, name: str) -> str:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
