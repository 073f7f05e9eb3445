"""All that the doctor knows about one rank, and what it thinks of it."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.doctor.devices import Devices, judge_devices, probe_devices
from rlhf.doctor.finding import Finding
from rlhf.doctor.limits import Limits, judge_limits, probe_limits
from rlhf.doctor.storage import Storage, judge_storage, probe_storage
from rlhf.doctor.versions import Versions, judge_versions, probe_versions
from rlhf.doctor.wires import Wires, judge_wires, probe_wires

_STEERING = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|NVTE|NVSHMEM|UCX|FI|OMP|MKL|KMP|HF|TOKENIZERS|SGLANG)_|LD_|PYTHON"
)
"""Variables that change how a job runs."""
_OWN = re.compile(r"TORCHELASTIC|PYTORCH_VERSION|KEY|TOKEN\b|_TOKEN|SECRET|PASSWORD")
"""Of one launcher or rank by right, or nobody's business."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What is the same for all ranks of a host; the first of them looks."""

    versions: Versions
    devices: Devices
    wires: Wires
    storage: Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """One rank."""

    rank: int
    host: str
    limits: Limits
    environment: Mapping[str, str]
    """Variables that change how a job runs."""
    python: str
    """Path of the interpreter."""
    host_facts: HostFacts | None
    """On the first rank of each host."""

    @property
    def comparable(self) -> dict[str, str]:
        """Name -> value of what should be the same on all ranks."""
        found = (
            self.limits.comparable | {"interpreter": self.python} | {f"${k}": v for k, v in self.environment.items()}
        )
        return found if self.host_facts is None else found | self._of_host(self.host_facts)

    def _of_host(self, facts: HostFacts) -> dict[str, str]:
        parts = (facts.versions, facts.devices, facts.wires, facts.storage)
        return {name: value for part in parts for name, value in part.comparable.items()}


def steering(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that change how a job runs, without secrets."""
    return {k: v for k, v in sorted(environment.items()) if _STEERING.match(k) and not _OWN.search(k)}


def examine(
    environment: Mapping[str, str],
    *,
    constraints: Path,
    folders: Sequence[Path],
    rank: int = 0,
    local_rank: int = 0,
    ranks_here: int = 1,
    num_hosts: int = 1,
) -> Examination:
    """Look at this rank and, on the first of a host, at the host. Communicates with nobody."""
    wires = probe_wires(environment, num_hosts=num_hosts)
    host_facts = None
    if local_rank == 0:
        devices = probe_devices(environment, ranks_here=ranks_here)
        host_facts = HostFacts(
            versions=probe_versions(constraints, has_gpu=bool(devices.gpus)),
            devices=devices,
            wires=wires,
            storage=probe_storage(folders),
        )
    return Examination(
        rank=rank,
        host=wires.host,
        limits=probe_limits(ranks_here=ranks_here),
        environment=steering(environment),
        python=sys.executable,
        host_facts=host_facts,
    )


def judge(examination: Examination) -> list[Finding]:
    """Findings about one rank, the good ones too."""
    facts, found = examination.host_facts, []
    if facts is not None:
        found += [*judge_versions(facts.versions), *judge_devices(facts.devices), *judge_wires(facts.wires)]
    found += judge_limits(examination.limits)
    return found if facts is None else [*found, *judge_storage(facts.storage)]
