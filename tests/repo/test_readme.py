"""What the READMEs, configs and scripts name is there: files, names in files, settings, config files, layers."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rlhf.config.load import load_config
from rlhf.config.run import check_world
from rlhf.config.schema import keys_of
from rlhf.dist.exit_record import ExitCode
from tests.repo.test_layers import LAYERS

REPO = Path(__file__).resolve().parents[2]
TEXT = (REPO / "README.md").read_text()
PACKAGES = [REPO / "megatron_patches", *sorted(p for p in (REPO / "rlhf").iterdir() if (p / "__init__.py").exists())]
FOLDERS = [REPO, REPO / "configs", REPO / "scripts" / "slurm", *PACKAGES]
READMES = [folder / "README.md" for folder in FOLDERS]
MADE_BY_RUNS = ("runs/", ".venv", ".cache/", "logs/", "heartbeat/", "tensorboard/", "hf/", "checkpoints/")


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]


@cache
def names_in(file: str) -> set[str]:
    """Functions and classes of a file, methods as Class.method."""
    found = set()
    for node in ast.parse((REPO / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def walk(title: str) -> list[tuple[str, str]]:
    """(file, name) of each thing that a walk's right column names: a file, then names in it."""
    found = []
    for row in re.findall(r"^\|.*\|([^|]*)\|$", section(title), re.MULTILINE):
        file = ""
        for span in code_spans(row):
            if span.endswith(".py"):
                file = span
            else:
                found.append((file, span))
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_each_package_has_a_readme_that_names_its_modules(package: Path) -> None:
    words = {word for span in code_spans((package / "README.md").read_text()) for word in re.split(r"[^\w.]+", span)}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    unnamed = {name for name in modules if name not in words and name.removesuffix(".py") not in words}
    assert not unnamed, f"{package.name}/README.md does not name {sorted(unnamed)}"


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_paths_from_the_root_exist(readme: Path) -> None:
    roots = ("rlhf/", "megatron_patches/", "scripts/", "configs/", "tests/", "tools/", "./scripts/", ".ci/")
    spans = [span.split()[0].split(":")[0] for span in code_spans(readme.read_text())]
    links = re.findall(r"\]\((?!#|https?:)([^)]+)\)", readme.read_text())
    named = [s for s in spans if s.startswith(roots) and not re.search("[*{]", s)]
    missing = [s for s in named if not (REPO / s).exists()] + [s for s in links if not (readme.parent / s).exists()]
    assert not missing, f"{readme.relative_to(REPO)} names {missing}"
    if readme.parent == REPO:
        assert len(named) > 60


@pytest.mark.parametrize(
    ("title", "least"),
    [
        ("Walk: a prompt, from its file to the gradient", 25),
        ("Walk: a weight, from the Hugging Face file to the rollout engine", 18),
    ],
)
def test_walks_name_what_exists(title: str, least: int) -> None:
    found = walk(title)
    assert len(found) >= least
    missing = [f"{file}: {name}" for file, name in found if name not in names_in(file)]
    assert not missing, missing


def test_config_files_that_texts_name_exist() -> None:
    sources = [
        *READMES,
        *(path for root in ("scripts", "configs", "tools", "rlhf") for path in (REPO / root).rglob("*")),
    ]
    for path in sources:
        if path.suffix in {".md", ".sh", ".py", ".yaml"}:
            for name in re.findall(r"configs/[\w/]+\.yaml", path.read_text()):
                assert (REPO / name).exists(), f"{path.relative_to(REPO)} names {name}"


def test_settings_in_the_readme_are_settings() -> None:
    valid = set()
    for file in ("quickstart/ppo.yaml", "quickstart/sft.yaml"):
        valid |= {key.path for key in keys_of(type(load_config([str(REPO / "configs" / file)])))}
    given = re.findall(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_0-9]+)+)=", TEXT)
    assert len(given) >= 8
    assert not (unknown := set(given) - valid), unknown


def test_the_rank_diagram_is_that_of_its_config() -> None:
    config = load_config([str(REPO / "configs/debug/ppo_layouts.yaml")])
    check_world(config, 6)
    picture = section("Ranks and roles")
    for role in ("actor", "critic", "reference"):
        layout = getattr(config, role).parallel
        sizes = " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "dp") if getattr(layout, axis) > 1)
        assert re.search(rf"^{role} .* {sizes}$", picture, re.MULTILINE), f"{role}: {sizes}"
    assert config.actor.parallel.layers_per_stage == (1, 3)
    assert "layer 0 " in picture
    assert "layers 1-3" in picture
    assert (config.rollout.tp, config.rollout.dp, config.rollout.first_rank) == (2, 2, 0)
    assert config.reference.parallel.ranks == range(4, 6)


def test_the_layers_are_those_that_are_enforced() -> None:
    lines = re.findall(r"^\d  [a-z].*$", section("Layers"), re.MULTILINE)
    assert [int(line[0]) for line in lines] == list(range(len(LAYERS)))
    assert [set(line[3:42].split()) for line in lines] == LAYERS  # what they are begins in the next column


def test_exit_codes_are_all_told() -> None:
    rows = re.findall(r"^\| (\d+) \|", section("Launch, stop, read"), re.MULTILINE)
    assert [int(code) for code in rows] == [int(code) for code in ExitCode]
