"""What the quickstart says before its first job; the jobs are tests/acceptance/test_quickstart.py."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import quickstart

SCRIPT = quickstart.REPO / "scripts" / "quickstart.sh"


def test_settings_that_cannot_work_are_refused_before_the_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "launch", lambda *_: pytest.fail("a job was started"))
    assert quickstart.main(["rollout.tp=3", "ppo.kl_coeff=0.1", f"log.folder={tmp_path}"]) == 2
    said = capfd.readouterr().err
    assert "rollout.tp: 3 does not divide num_heads = 4" in said
    assert "ppo.kl_coeff: unknown key; the nearest valid key is ppo.kl_coef;" in said


def test_settings_are_those_of_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, ...]] = []
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "launch", lambda *job: jobs.append(job) or 0)
    settings = ("ppo.kl_coef=0.05", f"log.folder={tmp_path}")
    assert quickstart.main(settings) == 0
    assert jobs == [("configs/quickstart/sft.yaml",), ("configs/quickstart/ppo.yaml", *settings)]


@pytest.mark.parametrize(("settings", "asked"), [((), "core"), (("rollout.engine=sglang", "name=x"), "core sglang")])
def test_sglang_is_set_up_where_a_setting_asks_for_it(tmp_path: Path, settings: tuple[str, ...], asked: str) -> None:
    for place, says in (("scripts/setup.sh", "setup"), (".venv/bin/python", "python")):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(f'#!/bin/sh\necho {says} "$@"\n')
        (tmp_path / place).chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    script = tmp_path / "scripts" / SCRIPT.name
    done = subprocess.run([script, *settings], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"setup {asked}",
        " ".join(["python", "tools/quickstart.py", *settings]),
    ]
