"""Pins stand in one place and cover what setup.py asks for; shell scripts parse."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf

REPO = Path(__file__).resolve().parents[2]
BATCH_SCRIPTS = sorted((REPO / "scripts" / "slurm").glob("*.sbatch"))
SCRIPTS = [*sorted((REPO / "scripts").glob("*.sh")), *BATCH_SCRIPTS, REPO / ".ci" / "run"]
SOURCED = [REPO / "scripts" / "slurm" / "batch_job.sh"]


def plain_name(requirement: str) -> str:
    """The package's normalised name, without extras and version."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; ]", requirement)[0]).lower()


def setup_lists() -> dict[str, list[str]]:
    """The lists of requirements that setup.py names at its top."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((REPO / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def pins() -> dict[str, str]:
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = {plain_name(line): line.partition("==")[2] for line in lines}
    assert len(found) == len(lines), "a name is pinned twice"
    return found


def test_every_dependency_is_pinned_exactly() -> None:
    lists = setup_lists()
    assert set(lists) == {"CORE", "TEST", "DEV", "SGLANG_CPU"}
    wanted = {plain_name(r) for names in lists.values() for r in names}
    pinned = pins()
    assert not (missing := wanted - set(pinned)), f"constraints.txt: no pin for {sorted(missing)}"
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pinned.values())
    assert next(iter(pinned)) == "torch"


def test_setup_py_holds_no_versions() -> None:
    assert not [r for names in setup_lists().values() for r in names if re.search("[=<>]", r)]


def test_every_import_of_the_package_is_a_dependency() -> None:
    provides = {"yaml": "pyyaml", "megatron": "megatron-core"}
    own = {"rlhf", "megatron_patches", "sglang", "transformer_engine", "flash_attn", "redis"}
    standard = set(sys.stdlib_module_names)
    outside = set()
    for path in [*(REPO / "rlhf").rglob("*.py"), *(REPO / "megatron_patches").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            outside |= {n.partition(".")[0] for n in names} - standard - own
    wanted = {plain_name(provides.get(name, name)) for name in outside}
    assert not (missing := wanted - {plain_name(r) for r in setup_lists()["CORE"]}), f"setup.py lacks {sorted(missing)}"


def test_version_is_a_literal() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", rlhf.__version__)
    assert f'__version__ = "{rlhf.__version__}"' in (REPO / "rlhf" / "__init__.py").read_text()


def test_shell_scripts_parse_and_can_be_run() -> None:
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o111, f"{script} is not executable"
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (apt-get install shellcheck)")
def test_shell_scripts_pass_shellcheck() -> None:
    subprocess.run(["shellcheck", *SCRIPTS, *SOURCED], check=True)


@pytest.mark.parametrize("name", ["setup", "test", "launch"])
def test_scripts_explain_themselves(name: str) -> None:
    script = REPO / "scripts" / f"{name}.sh"
    shown = subprocess.run([script, "--help"], check=True, capture_output=True, text=True).stdout
    assert "usage: scripts/" in shown
    assert "example" in shown


def test_setup_refuses_an_unknown_set() -> None:
    done = subprocess.run([REPO / "scripts" / "setup.sh", "everything"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "core|test|dev] [sglang]" in done.stderr
