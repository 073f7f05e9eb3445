"""The command that draws runs: where it writes, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from tools.plot_run import main


def run_folder(path: Path, num_steps: int, name: str = "reward/mean") -> Path:
    path.mkdir(parents=True)
    lines = [json.dumps({"step": step, name: float(step)}) for step in range(1, num_steps + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return path


def test_one_run_is_drawn_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "a", 3)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'curves.png'}\n"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_are_drawn_where_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(run_folder(tmp_path / "a", 3)), str(run_folder(tmp_path / "b", 2, "sft/loss"))]
    out = tmp_path / "both.png"
    assert main([*folders, "--out", str(out), "--smooth", "2"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.exists()
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 0
    assert (tmp_path / "curves.png").exists()
    assert not (tmp_path / "a" / "curves.png").exists()


def test_no_metrics_and_no_place_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "a", 0)
    assert main([str(folder)]) == 2
    assert "no step is written" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "none")]) == 2
    assert main([str(run_folder(tmp_path / "b", 1)), "--out", str(tmp_path / "no" / "b.png")]) == 2
    assert "--out: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--smooth", "0"])
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--out", str(tmp_path / "b.pdf")])
