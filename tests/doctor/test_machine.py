"""What is said about devices, network, storage and limits, on faked ones."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.doctor.devices import Devices, Gpu, judge_devices
from rlhf.doctor.finding import Finding, Level
from rlhf.doctor.limits import GIB, UNLIMITED, Limits, cgroup_limit, judge_limits
from rlhf.doctor.storage import Space, Storage, judge_storage, probe_storage, space_of
from rlhf.doctor.wires import Wires, judge_wires

H200 = Gpu(name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB)
GPUS = Devices(driver="570.1", cuda="12.8", gpus=(H200,) * 4, cpus=32, ranks_here=4)
CPUS = Devices(cpus=4, ranks_here=2)
WIRES = Wires(
    host="b", resolved=("10.0.0.5",), interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",), "ib0": ("10.1.0.5",)}
)
SHM = Space(path="/dev/shm", total_bytes=64 * GIB, free_bytes=60 * GIB)
DISK = Space(path="runs", total_bytes=100 * GIB, free_bytes=50 * GIB)
STORAGE = Storage(shm=SHM, leftovers=(), leftover_bytes=0, disks=(DISK,))
SOFT = {"nofile": 65536, "nproc": UNLIMITED, "memlock": UNLIMITED, "core": 0}
LIMITS = Limits(soft=SOFT, memory_bytes=64 * GIB, ranks_here=4)


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level > Level.OK]


def only(findings: list[Finding], level: Level, says: str) -> None:
    (finding,) = bad(findings)
    assert finding.level == level
    assert says in finding.found
    assert finding.cure


@pytest.mark.parametrize(
    "findings",
    [judge_devices(GPUS), judge_devices(CPUS), judge_wires(WIRES), judge_storage(STORAGE), judge_limits(LIMITS)],
)
def test_a_sound_machine_is_well(findings: list[Finding]) -> None:
    assert findings
    assert bad(findings) == []


@pytest.mark.parametrize(
    ("devices", "level", "says"),
    [
        (Devices(driver="570.1", cuda="12.8"), Level.ERROR, "torch (for CUDA 12.8) sees no GPU"),
        (Devices(driver="570.1"), Level.ERROR, "torch (for CPUs alone) sees no GPU"),
        (replace(CPUS, fault="no module named torch"), Level.ERROR, "no module named torch"),
        (replace(GPUS, ranks_here=8), Level.ERROR, "8 ranks share 4 GPUs"),
        (
            replace(GPUS, gpus=(H200, replace(H200, free_bytes=40 * GIB)) * 2, ranks_here=2),
            Level.WARNING,
            "GPU 1: 100.0",
        ),
        (replace(CPUS, cpus=1), Level.WARNING, "2 ranks share 1 CPU"),
        (replace(CPUS, omp_threads="3"), Level.WARNING, "OMP_NUM_THREADS=3, but a rank's share is 2.0"),
    ],
)
def test_devices(devices: Devices, level: Level, says: str) -> None:
    found = bad(judge_devices(devices))
    assert (found[0].level, len({finding.level for finding in found})) == (level, 1)
    assert says in found[0].found
    assert all(finding.cure for finding in found)


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"gloo": "eth7"}, Level.ERROR, "GLOO_SOCKET_IFNAME=eth7 names no interface"),
        ({"nccl": "=ib"}, Level.ERROR, "NCCL_SOCKET_IFNAME==ib names no interface"),
        ({"resolved": (), "num_hosts": 2}, Level.WARNING, "stands for no address"),
        ({"resolved": ("127.0.1.1", "::1"), "num_hosts": 2}, Level.WARNING, "stands for the loopback alone (127.0.1.1"),
        ({"interfaces": {"lo": ("127.0.0.1",)}, "num_hosts": 2, "gloo": "lo"}, Level.ERROR, "nothing but the loopback"),
    ],
)
def test_network(change: dict, level: Level, says: str) -> None:
    only(judge_wires(replace(WIRES, **change)), level, says)


def test_the_loopback_does_for_one_host() -> None:
    assert bad(judge_wires(replace(WIRES, resolved=("127.0.1.1",)))) == []


def test_interfaces_are_chosen_as_gloo_and_nccl_do() -> None:
    assert (WIRES.gloo_takes, WIRES.nccl_takes) == ("eth0", ("eth0", "ib0"))
    assert replace(WIRES, gloo="eth9,ib0").gloo_takes == "ib0"
    assert replace(WIRES, nccl="ib,eth").nccl_takes == ("eth0", "ib0")
    assert replace(WIRES, nccl="^ib,lo").nccl_takes == ("eth0",)
    assert replace(WIRES, nccl="=ib0").nccl_takes == ("ib0",)
    assert replace(WIRES, nccl="^=eth,lo").nccl_takes == ("eth0", "ib0")


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"shm": replace(SHM, free_bytes=GIB // 16)}, Level.WARNING, "0.1 of 64.0 GiB free; needs 1"),
        ({"shm": replace(SHM, fault="read-only")}, Level.ERROR, "cannot be written: read-only"),
        (
            {"leftovers": ("/dev/shm/torch_1_2", "x"), "leftover_bytes": GIB},
            Level.WARNING,
            "2 segments of dead processes",
        ),
        ({"disks": (replace(DISK, free_bytes=2 * GIB),)}, Level.WARNING, "runs: 2.0 of 100 GiB free"),
        ({"disks": (replace(DISK, free_bytes=GIB // 4),)}, Level.ERROR, "runs: 0.2 of 100 GiB free"),
        ({"disks": (replace(DISK, fault="denied"),)}, Level.ERROR, "runs cannot be written: denied"),
    ],
)
def test_storage(change: dict, level: Level, says: str) -> None:
    only(judge_storage(replace(STORAGE, **change)), level, says)


def test_segments_of_the_dead_are_found(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"torch_{gone.pid}_1_0", "torch_1_2_0", "sem.other"):
        (tmp_path / name).write_bytes(b"12345")
    storage = probe_storage([tmp_path / "new" / "runs"], shm=tmp_path)
    assert storage.leftovers == (str(tmp_path / f"torch_{gone.pid}_1_0"),)
    assert storage.leftover_bytes == 5
    assert storage.disks[0].fault == ""  # that of the folder above it
    assert not (tmp_path / "new").exists()
    assert "No such file" in space_of(Path("/proc")).fault or "denied" in space_of(Path("/proc")).fault


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"soft": {**SOFT, "nofile": 1024}}, Level.WARNING, "1024 open files"),
        ({"soft": {**SOFT, "nofile": 256}}, Level.ERROR, "256 open files"),
        ({"soft": {**SOFT, "nproc": 1000}}, Level.WARNING, "1000 processes"),
        ({"soft": {**SOFT, "memlock": 65536}, "infiniband": True}, Level.ERROR, "64 KiB may be locked"),
        ({"cgroup_bytes": 4 * GIB}, Level.WARNING, "1.0 GiB for each of 4 rank(s); 64.0 GiB on the host, its cgroup"),
    ],
)
def test_limits(change: dict, level: Level, says: str) -> None:
    only(judge_limits(replace(LIMITS, **change)), level, says)


def test_locked_memory_matters_to_infiniband_alone() -> None:
    assert bad(judge_limits(replace(LIMITS, soft={**SOFT, "memlock": 65536}))) == []


def test_the_smallest_cgroup_counts(tmp_path: Path) -> None:
    for path, text in (
        ("a/memory.max", "max"),
        ("a/b/memory.max", str(3 * GIB)),
        ("a/b/c/memory.max", str(5 * GIB)),
        ("memory/job/memory.limit_in_bytes", str(2 * GIB)),
        ("memory/memory.limit_in_bytes", str(2**63 - 4096)),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert cgroup_limit("0::/a/b/c\n", tmp_path) == 3 * GIB
    assert cgroup_limit("0::/a\n", tmp_path) == UNLIMITED
    assert cgroup_limit("4:memory:/job\n3:cpuset:/a\n", tmp_path) == 2 * GIB
    assert cgroup_limit("4:memory:/\n", tmp_path) == UNLIMITED
