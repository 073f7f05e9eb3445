"""Whether the installed packages belong together: against constraints.txt, and against namesakes on PyPI."""

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.doctor.finding import Finding, error, ok, warning

NEEDED = ("torch", "megatron-core", "transformers", "tokenizers", "numpy", "safetensors", "omegaconf", "psutil")
"""Named in the report; every other pin is compared too."""
OPTIONAL = {
    "transformer-engine": "transformer_engine.pytorch",
    "apex": "apex.optimizers",
    "flash-attn": "flash_attn",
    "sglang": "sglang",
}
"""Distribution -> what is imported of it on a machine with a GPU."""
SETUP = "run scripts/setup.sh"
IMPORT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What is installed."""

    python: str
    installed: Mapping[str, str]
    """Distribution, by its normal name -> version."""
    pins: Mapping[str, str]
    """Of constraints.txt, likewise."""
    apex_is_nvidias: bool | None = None
    """None without a package of that name."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Optional package -> last line of its failed import; tried where there is a GPU."""
    patches: str = ""
    """What the check of megatron_patches said."""
    patches_fit: bool = True

    @property
    def comparable(self) -> dict[str, str]:
        """What must be the same on all hosts."""
        names = sorted({*NEEDED, *OPTIONAL} & set(self.installed))
        return {"python": self.python} | {name: self.installed[name] for name in names}


def normal(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(constraints: Path) -> dict[str, str]:
    """Name -> version of every pin; none when there is no such file."""
    text = constraints.read_text() if constraints.is_file() else ""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", text, re.MULTILINE)}


def is_nvidias_apex(folder: Path) -> bool:
    """Whether a package folder named apex is NVIDIA's: PyPI's project of that name has no optimizers."""
    return (folder / "optimizers" / "__init__.py").is_file() and (folder / "normalization").is_dir()


def run_python(*arguments: str, limit_s: float = IMPORT_S, folder: Path = Path()) -> tuple[int, str]:
    """Exit code and output of this interpreter in a process of its own, which finds modules in `folder` too."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=limit_s, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {limit_s:.0f} s"
    return done.returncode, (done.stdout + done.stderr).strip()


def probe_versions(constraints: Path, *, has_gpu: bool) -> Versions:
    """What is installed here. Imports megatron, and on a GPU the optional packages, in processes of their own."""
    found = {normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    spec = importlib.util.find_spec("apex")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    faults = {}
    for name, module in OPTIONAL.items():
        if has_gpu and importlib.util.find_spec(module.partition(".")[0]) is not None:
            code, said = run_python("-c", f"import {module}")
            if code:
                faults[name] = said.splitlines()[-1] if said else f"exit code {code}"
    fits, patches = 0, ""
    if "megatron-core" in found and "torch" in found:
        fits, said = run_python("-m", "rlhf.mcore.patch_check", folder=constraints.parent)
        patches = said.splitlines()[-1] if said else ""
    return Versions(
        python=platform.python_version(),
        installed=found,
        pins=read_pins(constraints),
        apex_is_nvidias=is_nvidias_apex(Path(places[0])) if places else None,
        faults=faults,
        patches=patches,
        patches_fit=fits == 0,
    )


def judge_versions(versions: Versions) -> list[Finding]:
    """Findings, the good ones too."""
    subject, found = "versions", []
    if tuple(int(part) for part in versions.python.split(".")[:2]) < (3, 11):
        found.append(error(subject, f"python {versions.python}", "needs 3.11 or newer: install it, " + SETUP))
    if missing := [name for name in NEEDED if name not in versions.installed]:
        found.append(error(subject, f"not installed: {', '.join(missing)}", SETUP))
    found += _departures(versions)
    found += _namesakes(versions)
    for name, fault in versions.faults.items():
        cure = f"build {name} against this torch and CUDA, or uninstall it: without it the fallback runs"
        found.append(error(subject, f"{name} does not import: {fault}", cure))
    if not versions.patches_fit:
        cure = "install the megatron-core of constraints.txt, or re-read the patch as megatron_patches/README.md says"
        found.append(error(subject, f"megatron_patches: {versions.patches}", cure))
    told = [f"{name} {versions.installed[name]}" for name in (*NEEDED[:4], *OPTIONAL) if name in versions.installed]
    absent = [name for name in OPTIONAL if name not in versions.installed]
    text = ", ".join([f"python {versions.python}", *told])
    text += f"; {versions.patches}" if versions.patches_fit and versions.patches else ""
    return [ok(subject, text + (f"; without {', '.join(absent)}" if absent else "")), *found]


def _departures(versions: Versions) -> list[Finding]:
    """Packages that are installed in another version than the one they were tested in."""
    if not versions.pins:
        return [warning("versions", "no constraints.txt here: no pin was compared", "run it from the project's root")]
    other = [
        f"{name} {have} (pinned {versions.pins[name]})"
        for name, have in sorted(versions.installed.items())
        if name in versions.pins and have.partition("+")[0] != versions.pins[name]
    ]
    text = ", ".join(other[:8]) + (f" and {len(other) - 8} more" if len(other) > 8 else "")
    return [warning("versions", f"not as in constraints.txt: {text}", SETUP)] if other else []


def _namesakes(versions: Versions) -> list[Finding]:
    found = []
    if versions.apex_is_nvidias is False:
        cure = "pip uninstall apex; NVIDIA's is built from its own source, or is left out"
        found.append(error("versions", "apex is PyPI's project of that name, not NVIDIA's", cure))
    if "megatron" in versions.installed:
        cure = "pip uninstall megatron, then reinstall megatron-core"
        found.append(error("versions", "PyPI's project `megatron` lies over megatron-core's package", cure))
    return found
