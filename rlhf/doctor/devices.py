"""GPUs, their driver and memory, or the CPUs that a rank may use."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.doctor.finding import Finding, error, ok, warning
from rlhf.doctor.versions import run_python

_ASK_TORCH = """
import json, torch
gpus = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    gpus.append((torch.cuda.get_device_name(i), total, free))
print(json.dumps({"cuda": torch.version.cuda or "", "gpus": gpus}))
"""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """What one rank can compute on."""

    driver: str = ""
    """NVIDIA's kernel driver; empty without one."""
    cuda: str = ""
    """CUDA that torch was built for; empty for a CPU build."""
    fault: str = ""
    """Why torch could not tell."""
    gpus: tuple[Gpu, ...] = ()
    cpus: int = 1
    """That this process may run on."""
    omp_threads: str = ""
    """OMP_NUM_THREADS."""
    ranks_here: int = 1
    """Ranks of the job on this host."""

    @property
    def comparable(self) -> dict[str, str]:
        """What must be the same on all hosts."""
        names = sorted({gpu.name for gpu in self.gpus})
        return {
            "GPUs": f"{len(self.gpus)} {', '.join(names)}".strip(),
            "driver": self.driver,
            "CUDA of torch": self.cuda,
            "CPUs of a rank": str(self.cpus),
        }


def probe_devices(environment: Mapping[str, str], *, ranks_here: int) -> Devices:
    """What is here. Asks torch in a process of its own, so that no memory of a GPU is held."""
    code, said = run_python("-c", _ASK_TORCH)
    told = json.loads(said.splitlines()[-1] if code == 0 else '{"cuda": "", "gpus": []}')
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split() if version.is_file() else []
    return Devices(
        driver=next((word for word in words if word[:1].isdigit() and "." in word), ""),
        cuda=told["cuda"],
        fault="" if code == 0 else (said.splitlines() or [f"exit code {code}"])[-1],
        gpus=tuple(Gpu(name=name, total_bytes=total, free_bytes=free) for name, total, free in told["gpus"]),
        cpus=len(os.sched_getaffinity(0)),
        omp_threads=environment.get("OMP_NUM_THREADS", ""),
        ranks_here=ranks_here,
    )


def judge_devices(devices: Devices) -> list[Finding]:
    """Findings, the good ones too."""
    subject, found = "devices", []
    if devices.fault:
        found.append(error(subject, f"torch cannot tell the devices: {devices.fault}", "run scripts/setup.sh"))
    elif devices.driver and not devices.gpus:
        built = f"CUDA {devices.cuda}" if devices.cuda else "CPUs alone"
        cure = "install torch's CUDA build for this driver, and check CUDA_VISIBLE_DEVICES and the container's --gpus"
        found.append(error(subject, f"driver {devices.driver} is loaded, but torch (for {built}) sees no GPU", cure))
    if devices.gpus and devices.ranks_here > len(devices.gpus):
        cure = f"start at most {len(devices.gpus)} ranks on the host (--nproc), or show it more GPUs"
        found.append(error(subject, f"{devices.ranks_here} ranks share {len(devices.gpus)} GPUs", cure))
    for index, gpu in enumerate(devices.gpus):
        used = gpu.total_bytes - gpu.free_bytes
        if used > 0.1 * gpu.total_bytes:
            text = f"GPU {index}: {used / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are taken already"
            found.append(warning(subject, text, "end what runs there (nvidia-smi shows it)"))
    return [ok(subject, _described(devices)), *found, *_judge_cpus(devices)]


def _described(devices: Devices) -> str:
    if not devices.gpus:
        return f"no GPU; {devices.cpus} CPUs for {devices.ranks_here} rank(s)"
    names = ", ".join(sorted({gpu.name for gpu in devices.gpus}))
    memory = min(gpu.total_bytes for gpu in devices.gpus) / GIB
    return f"{len(devices.gpus)} x {names}, {memory:.0f} GiB, driver {devices.driver}, CUDA {devices.cuda}"


def _judge_cpus(devices: Devices) -> list[Finding]:
    found, share = [], devices.cpus / devices.ranks_here
    if share < 1:
        cure = "give the job more (srun --cpus-per-task, or no CPU binding), or start fewer ranks"
        found.append(warning("devices", f"{devices.ranks_here} ranks share {devices.cpus} CPU(s)", cure))
    threads = devices.omp_threads
    if threads.isdigit() and int(threads) > max(1, share):
        text = f"OMP_NUM_THREADS={threads}, but a rank's share is {share:.1f} CPU(s)"
        found.append(warning("devices", text, "unset it, or set it to the share"))
    return found
