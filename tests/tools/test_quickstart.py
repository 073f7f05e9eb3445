"""What the quickstart says before its first job; the jobs are tests/acceptance/test_quickstart.py."""

from pathlib import Path

import pytest

from tools import quickstart


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rollout.engine=sgland", "rollout.engine: 'sgland' given; needs native, sglang or"),
        ("rollout.tp=3", "rollout.tp: 3 "),
        ("ppo.kl_coeff=0.1", "the nearest valid key is ppo.kl_coef;"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_the_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], setting: str, says: str
) -> None:
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "launch", lambda *_: pytest.fail("a job was started"))
    assert quickstart.main([setting, f"log.folder={tmp_path}"]) == 2
    assert says in capfd.readouterr().err


def test_settings_are_those_of_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, ...]] = []
    monkeypatch.setattr(quickstart, "FOLDER", tmp_path)
    monkeypatch.setattr(quickstart, "launch", lambda *job: jobs.append(job) or 0)
    settings = ("ppo.kl_coef=0.05", f"log.folder={tmp_path}")
    assert quickstart.main(settings) == 0
    assert jobs == [("configs/quickstart/sft.yaml",), ("configs/quickstart/ppo.yaml", *settings)]
