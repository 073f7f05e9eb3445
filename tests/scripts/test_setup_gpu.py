"""scripts/setup_gpu.sh says all that a machine lacks before it touches anything, and its pins belong together.

What it installs has never been installed by it: that needs a GPU.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhf.doctor.versions import read_pins

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "setup_gpu.sh"
CONSTRAINTS = REPO / "constraints.txt"
TOOLS = ("awk", "bash", "cat", "dirname", "env", "head", "nproc", "sed")
"""What the script runs of any Linux; the machine's own g++, git, df, nvcc and nvidia-smi are out of its sight."""
IMAGE = {"TORCH_CUDA_ARCH_LIST": "9.0"}
"""What the build of an image says."""


class Machine:
    """A path with stand-ins of our choice and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.cuda = folder / "bin", folder / "cuda"
        self.bin.mkdir()
        (self.cuda / "bin").mkdir(parents=True)
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.command(self.bin / "df", "printf 'x\\nx x x %d x x\\n' $((90 << 20))")

    def command(self, path: Path, body: str) -> None:
        path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        path.chmod(0o755)

    def gpu(self, driver: str) -> None:
        self.command(self.bin / "nvidia-smi", f"echo {driver}; echo {driver}")

    def toolkit(self, version: str) -> None:
        self.command(self.cuda / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {version}, V{version}.88'")

    def compilers(self) -> None:
        for name in ("g++", "git"):
            self.command(self.bin / name, "exit 0")

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [str(SCRIPT), *arguments],
            env={"PATH": str(self.bin), "CUDA_HOME": str(self.cuda), "RLHF_PYTHON": sys.executable, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_a_gpu_is_told_all_that_it_lacks_at_once(machine: Machine) -> None:
    machine.command(machine.bin / "df", "printf 'x\\nx x x %d x x\\n' $((3 << 20))")
    code, said, lacking = machine.run()
    assert (code, said) == (2, "")
    for words in ("no nvidia-smi", "no nvcc", "g++: not on the path", "git: not on the path", "disk: 3 GiB free"):
        assert words in lacking
    assert "5 thing(s) missing; nothing was installed" in lacking


def test_an_old_driver_another_toolkit_and_a_dead_gpu_are_told_with_what_was_found(machine: Machine) -> None:
    machine.compilers()
    machine.gpu("535.54.03")
    machine.toolkit("12.4")
    code, _, lacking = machine.run()
    assert code == 2
    assert "driver: found 535.54.03; needs 580 or newer" in lacking
    assert "nvcc is 12.4; needs 13.0" in lacking
    machine.command(machine.bin / "nvidia-smi", "echo 'No devices were found'; exit 6")
    machine.toolkit("13.0")
    code, _, lacking = machine.run()
    assert code == 2
    assert "nvidia-smi says 'No devices were found'" in lacking
    assert "toolkit" not in lacking


def test_a_machine_that_will_do_passes_the_check_and_an_image_needs_no_driver(machine: Machine) -> None:
    machine.compilers()
    machine.toolkit("13.0")
    code, _, lacking = machine.run("--check", "--no-gpu")
    assert code == 2
    assert "TORCH_CUDA_ARCH_LIST: not set" in lacking
    assert machine.run("--check", "--no-gpu", "sglang")[0] == 0
    assert machine.run("--check", "--no-gpu", **IMAGE)[0] == 0
    assert machine.run("--check")[0] == 2
    machine.gpu("580.65.06")
    code, said, lacking = machine.run("--check")
    assert (code, lacking) == (0, "")
    assert "will do" in said


def test_the_other_project_named_apex_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.compilers()
    machine.toolkit("13.0")
    package = tmp_path / "site" / "apex"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    code, _, lacking = machine.run("--check", "--no-gpu", PYTHONPATH=str(package.parent), **IMAGE)
    assert code == 2
    assert f"{package} is not NVIDIA's" in lacking
    assert "pip uninstall apex" in lacking
    (package / "optimizers").mkdir()
    (package / "optimizers" / "__init__.py").touch()
    assert machine.run("--check", "--no-gpu", PYTHONPATH=str(package.parent), **IMAGE)[0] == 0


def test_it_explains_itself_and_refuses_an_unknown_part(machine: Machine) -> None:
    code, said, _ = machine.run("--help")
    assert code == 0
    assert "usage: scripts/setup_gpu.sh" in said
    code, _, said = machine.run("everything")
    assert code == 2
    assert "train|sglang" in said


def test_transformer_engine_is_one_that_this_megatron_core_asks_for() -> None:
    pins = read_pins(CONSTRAINTS)
    assert len({pins[f"transformer-engine{part}"] for part in ("", "-cu13", "-torch")}) == 1
    asked = [Requirement(one) for one in importlib.metadata.requires("megatron-core") or []]
    wanted = [one for one in asked if one.name == "transformer-engine"]
    assert wanted
    for one in wanted:
        assert one.specifier.contains(pins["transformer-engine"]), f"megatron-core wants {one}"
    if any("core_cu13" in one.extras for one in wanted):
        assert "transformer-engine[core_cu13,pytorch]" in SCRIPT.read_text()


def test_versions_stand_in_constraints_alone() -> None:
    dockerfile = (REPO / "scripts" / "Dockerfile").read_text()
    assert not re.findall(r"==\d|git\+https", SCRIPT.read_text() + dockerfile)
    text = CONSTRAINTS.read_text()
    (cuda,) = re.findall(r"^# cuda ([\d.]+):", text, re.MULTILINE)
    (image,) = re.findall(r"^ARG CUDA=([\d.]+)$", dockerfile, re.MULTILINE)
    assert image.startswith(f"{cuda}.")
    assert len(re.findall(r"^# apex git\+https://github\.com/NVIDIA/apex@[0-9a-f]{40}$", text, re.MULTILINE)) == 1
    assert "setup_gpu.sh --no-gpu" in dockerfile
    for folder in re.findall(r"^COPY (\S+) \S+$", dockerfile, re.MULTILINE):
        assert (REPO / folder).exists(), folder


def test_this_machine_ends_with_2_where_it_has_no_gpu() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has nvidia-smi")
    done = subprocess.run([str(SCRIPT)], env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no nvidia-smi" in done.stderr
