"""Every file in configs/ is checked for the job that its header names, as a user would check it."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.config.load import load_config
from rlhf.families.registry import hf_config, logical_tensors
from rlhf.families.spec import Head
from rlhf.families.writer import write_checkpoint
from rlhf.preflight import dry_run
from rlhf.preflight.inputs import roles_of
from tools.quickstart import TINY

REPO = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO / "configs").rglob("*.yaml"))
HEADER = "# check: "
MADE_BY_QUICKSTART = ".cache/quickstart/"
TINY_SPEC = replace(TINY, vocab_size=320)  # about what its tokenizer has


@pytest.fixture(scope="module")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ./scripts/quickstart.sh would have made, with weights of zero."""
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    tensors = {one.name: torch.zeros(one.shape) for one in logical_tensors(TINY_SPEC, head=Head.LM)}
    write_checkpoint(folder, tensors, hf_config(TINY_SPEC))
    return folder


def header_of(file: Path) -> list[str]:
    """Words after `# check:`: options of --check, and overrides that it needs."""
    lines = [line for line in file.read_text().splitlines() if line.startswith(HEADER)]
    assert len(lines) == 1, f"{file.relative_to(REPO)}: needs one line `{HEADER}--world-size N --gpus-per-node M`"
    words = shlex.split(lines[0].removeprefix(HEADER))
    assert {"--world-size", "--gpus-per-node"} <= set(words), lines[0]
    return words


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: str(path.relative_to(REPO / "configs")))
def test_nothing_is_wrong_for_the_job_that_the_header_names(
    file: Path,
    quickstart_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlhf.preflight.inputs.check_installed", lambda options: None)  # as where it is installed
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))  # shapes, not weights
    words = header_of(file)
    overrides = [word for word in words if "=" in word]
    config = load_config([str(file), *overrides])
    for name, role in roles_of(config).items():
        if role.model.path.startswith(MADE_BY_QUICKSTART):
            overrides.append(f"{name}.model.path={quickstart_model}")
    if config.data.source != "reasoning_gym":  # a user's own file
        (tmp_path / "rows").touch()
        overrides.append(f"data.path={tmp_path}/rows")
    code = dry_run.main([str(file), *overrides, *(word for word in words if "=" not in word)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "check: nothing wrong" in out
    assert f"{words[words.index('--world-size') + 1]} ranks" in out
    assert "microbatches of one step" in out
    assert "all roles of a rank" in out
    assert not (tmp_path / "runs").exists()
