"""What the system allows a rank: open files, processes, locked memory, core files, memory and CPU of its cgroup."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf.doctor.finding import Finding, error, ok, warning

GIB = 2**30
UNLIMITED = -1
FILES, FILES_TIGHT, PROCESSES = 4096, 512, 4096
RANK_GIB = 2.0
"""A rank with torch and Megatron imported takes about half a GiB before its model."""
_KINDS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
    "core": resource.RLIMIT_CORE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one rank's process."""

    soft: Mapping[str, int]
    """ulimit by name (nofile, nproc, memlock in bytes, core in bytes); UNLIMITED."""
    memory_bytes: int
    """Of the host."""
    cgroup_bytes: int = UNLIMITED
    """Of the smallest cgroup around the process."""
    ranks_here: int = 1
    infiniband: bool = False

    @property
    def comparable(self) -> dict[str, str]:
        """What should be the same on all ranks."""
        sizes = {
            f"ulimit {name}": "unlimited" if value == UNLIMITED else str(value) for name, value in self.soft.items()
        }
        return sizes | {"memory": f"{self.usable_bytes / GIB:.0f} GiB"}

    @property
    def usable_bytes(self) -> int:
        """What the host's ranks may take together."""
        return self.memory_bytes if self.cgroup_bytes == UNLIMITED else min(self.memory_bytes, self.cgroup_bytes)


def cgroup_limit(membership: str, root: Path) -> int:
    """The smallest memory limit on the way from the root to the process's cgroup, in bytes.

    Args:
        membership: Text of /proc/self/cgroup.
        root: Where cgroups are mounted.
    """
    found = []
    for line in membership.splitlines():
        _, kind, path = line.split(":", 2)
        if kind not in ("", "memory"):
            continue
        base, file = (root, "memory.max") if kind == "" else (root / "memory", "memory.limit_in_bytes")
        steps = [
            base,
            *(base / Path(*path.strip("/").split("/")[: n + 1]) for n in range(path.strip("/").count("/") + 1)),
        ]
        texts = [(step / file).read_text().strip() for step in steps if (step / file).is_file()]
        found += [int(text) for text in texts if text.isdigit() and int(text) < 2**60]  # v1 writes a huge number
    return min(found, default=UNLIMITED)


def probe_limits(*, ranks_here: int) -> Limits:
    """This process's."""
    membership = Path("/proc/self/cgroup")
    return Limits(
        soft={name: resource.getrlimit(kind)[0] for name, kind in _KINDS.items()},
        memory_bytes=psutil.virtual_memory().total,
        cgroup_bytes=cgroup_limit(membership.read_text(), Path("/sys/fs/cgroup"))
        if membership.is_file()
        else UNLIMITED,
        ranks_here=ranks_here,
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def judge_limits(limits: Limits) -> list[Finding]:
    """Findings, the good ones too."""
    soft, found = limits.soft, []
    files = soft["nofile"]
    if files != UNLIMITED and files < FILES:
        cure = f"ulimit -n {FILES * 16} before the launch, or LimitNOFILE in the service that starts it"
        text = f"{files} open files allowed; sockets to all ranks, workers and data files want {FILES}"
        found.append((error if files < FILES_TIGHT else warning)("limits", text, cure))
    if soft["nproc"] != UNLIMITED and soft["nproc"] < PROCESSES:
        text = f"{soft['nproc']} processes and threads allowed; needs {PROCESSES}"
        found.append(warning("limits", text, "ulimit -u unlimited, or LimitNPROC"))
    if limits.infiniband and soft["memlock"] != UNLIMITED:
        text = f"{soft['memlock'] // 1024} KiB may be locked, and InfiniBand registers memory by locking it"
        found.append(error("limits", text, "ulimit -l unlimited (docker --ulimit memlock=-1, LimitMEMLOCK=infinity)"))
    shown = [f"{name} {'unlimited' if value == UNLIMITED else value}" for name, value in soft.items()]
    capped = limits.cgroup_bytes != UNLIMITED and limits.cgroup_bytes < limits.memory_bytes
    cgroup = f", its cgroup allows {limits.cgroup_bytes / GIB:.1f}" if capped else ""
    memory = f"{limits.memory_bytes / GIB:.1f} GiB on the host{cgroup}"
    found += [ok("limits", ", ".join(shown)), ok("memory", memory)]
    share = limits.usable_bytes / limits.ranks_here / GIB
    if share < RANK_GIB:
        cure = "ask for more (srun --mem, docker --memory), or start fewer ranks on the host"
        found.append(warning("memory", f"{share:.1f} GiB for each of {limits.ranks_here} rank(s); {memory}", cure))
    return found
