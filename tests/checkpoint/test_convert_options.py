"""What is said about a checkpoint on the command line counts, or is refused where it would do nothing."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf.checkpoint.convert.command import main

BAD_INPUT = 2


@pytest.fixture(scope="module")
def there(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` in each format of Megatron-LM. Read only."""
    root = tmp_path_factory.mktemp("there")
    for kind in ("torch_dist", "legacy"):
        assert main(["to-megatron", str(models / "llama"), str(root / kind), "--format", kind]) == 0
    return root


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(one) for one in arguments]) == BAD_INPUT
    return capsys.readouterr().err


def test_options_that_would_do_nothing_are_refused(
    models: Path, there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = models / "llama", tmp_path / "out"
    for argv, says in (
        (("to-hf", model, out, "--role", "actor"), "--role actor: means nothing for"),
        (("to-megatron", model, out, "--config-from", model), f"--config-from {model}: means nothing for"),
        (("to-hf", there / "legacy", out, "--role", "actor"), "--role actor: means nothing for"),
        (("to-hf", there / "torch_dist", out, "--role", "actor"), "no model 'actor'; it holds one without a name"),
        (("to-megatron", model, out, "--names", "te"), "--names te: means something for --format legacy only"),
        (("to-megatron", model, out, "--processes", 2), "--processes 2: means something with --dry-run only"),
        (("to-hf", model, out, "--role", "a", "--dry-run"), "--role a: means nothing with --dry-run"),
        (("to-hf", model, out, "--config-from", model, "--dummy"), "means nothing with --dummy"),
        (("inspect", model, "--role", "actor"), "--role actor: means nothing for"),
        (("inspect", there / "legacy", "--role", "actor"), "--role actor: means nothing for"),
        (("inspect", there / "torch_dist", "--role", "actor"), "no model 'actor'; it holds one without a name"),
        (("verify", model, model, "--config-from", model), "means nothing for"),
    ):
        assert says in refused(capsys, *argv)
        assert not list(tmp_path.iterdir())
    assert main(["verify", str(model), str(there / "legacy"), "--config-from", str(model), "--no-logits"]) == 0


def test_a_report_that_cannot_be_written_is_noticed_before_the_work(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, nowhere = models / "llama", tmp_path / "nowhere" / "report.json"
    for argv in (("to-megatron", model, tmp_path / "out"), ("to-hf", model, tmp_path / "out", "--dummy")):
        assert f"--json {nowhere}: No such file or directory" in refused(capsys, *argv, "--json", nowhere)
        assert not list(tmp_path.iterdir())
    for argv in (("verify", model, model), ("inspect", model), ("to-hf", model, tmp_path / "out", "--dry-run")):
        assert "Is a directory" in refused(capsys, *argv, "--json", tmp_path)
    report = tmp_path / "report.json"
    report.write_text("of an earlier time")
    refused(capsys, "to-hf", tmp_path / "no model", tmp_path / "out", "--json", report)
    assert report.read_text() == "of an earlier time"
    report.unlink()
    refused(capsys, "to-hf", tmp_path / "no model", tmp_path / "out", "--json", report)
    assert not report.exists()


def test_files_are_read_against_their_checksums_unless_it_is_left_out(
    models: Path, there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(there / "torch_dist", tmp_path / "source")
    (source / "generation_config.json").write_text("{ }")  # nothing but its checksum tells
    for command in (("to-hf", source, tmp_path / "out"), ("verify", models / "llama", source, "--no-logits")):
        assert "generation_config.json" in refused(capsys, *command)
    assert main(["inspect", str(source)]) == 1
    capsys.readouterr()
    assert main(["inspect", str(source), "--no-check"]) == 0
    assert "UNKNOWN: not read, as asked for" in capsys.readouterr().out
    assert main(["to-hf", str(source), str(tmp_path / "out"), "--no-check"]) == 0
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{ }"


@pytest.mark.parametrize("kind", ["torch_dist", "legacy"])
def test_what_the_command_line_says_of_the_model_comes_before_what_the_folder_says(
    kind: str, models: Path, there: Path, tmp_path: Path
) -> None:
    other, report = shutil.copytree(models / "llama", tmp_path / "other"), tmp_path / "report.json"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.25}))
    for argv, eps in ((), config["rms_norm_eps"]), (("--config-from", str(other)), 0.25):
        assert main(["inspect", str(there / kind), *argv, "--json", str(report)]) == 0
        (model,) = json.loads(report.read_text())["models"]
        assert model["spec"]["norm_eps"] == eps


@pytest.mark.parametrize("size", ["0", "-1GB", "5 apples", "9" * 400], ids=["nothing", "negative", "unit", "endless"])
def test_what_is_no_size_is_refused_as_an_argument(
    size: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["to-hf", str(models / "llama"), str(tmp_path / "out"), f"--shard-size={size}"])
    assert "needs a size such as 5GB" in capsys.readouterr().err
