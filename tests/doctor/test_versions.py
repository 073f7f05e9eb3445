"""What is said about installed packages, on faked ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.doctor.finding import Finding, Level
from rlhf.doctor.versions import NEEDED, Versions, is_nvidias_apex, judge_versions, read_pins, run_python
from tests.scripts.launched import REPO

GOOD = Versions(
    python="3.11.7",
    installed={name: "1.0" for name in NEEDED} | {"torch": "1.0+cpu"},
    pins={name: "1.0" for name in (*NEEDED, "sglang")},
    patches="22 patches fit",
)


def bad(versions: Versions) -> list[Finding]:
    return [finding for finding in judge_versions(versions) if finding.level > Level.OK]


def test_what_belongs_together_is_well() -> None:
    assert bad(GOOD) == []
    told = judge_versions(GOOD)[0].found
    assert "torch 1.0+cpu" in told
    assert "22 patches fit; without transformer-engine, apex, flash-attn, sglang" in told


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"python": "3.10.12"}, Level.ERROR, "python 3.10.12"),
        ({"installed": {**GOOD.installed, "tokenizers": "0.9"}}, Level.WARNING, "tokenizers 0.9 (pinned 1.0)"),
        ({"installed": {**GOOD.installed, "sglang": "2.0"}}, Level.WARNING, "sglang 2.0 (pinned 1.0)"),
        ({"installed": {k: v for k, v in GOOD.installed.items() if k != "torch"}}, Level.ERROR, "not installed: torch"),
        ({"pins": {}}, Level.WARNING, "no constraints.txt"),
        ({"apex_is_nvidias": False}, Level.ERROR, "not NVIDIA's"),
        ({"installed": {**GOOD.installed, "megatron": "0.1"}}, Level.ERROR, "PyPI's project `megatron`"),
        (
            {"faults": {"flash-attn": "undefined symbol: x"}},
            Level.ERROR,
            "flash-attn does not import: undefined symbol",
        ),
        ({"patches_fit": False, "patches": "megatron.x:f: source is 1"}, Level.ERROR, "megatron.x:f: source is 1"),
    ],
)
def test_each_fault_is_told_with_its_cure(change: dict, level: Level, says: str) -> None:
    (finding,) = bad(replace(GOOD, **change))
    assert (finding.level, finding.subject) == (level, "versions")
    assert says in finding.found
    assert finding.cure


def test_pins_are_read_under_their_normal_names(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# torch==9\nTorch==2.13.0\nhf_xet==1.8.0\nantlr4-python3-runtime==4.13.2\n")
    assert read_pins(file) == {"torch": "2.13.0", "hf-xet": "1.8.0", "antlr4-python3-runtime": "4.13.2"}
    assert read_pins(tmp_path / "none") == {}
    assert {"torch", "megatron-core"} <= set(read_pins(REPO / "constraints.txt"))


def test_the_namesake_of_apex_is_told_apart(tmp_path: Path) -> None:
    for name in ("theirs/models", "ours/optimizers", "ours/normalization"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    assert is_nvidias_apex(tmp_path / "ours")
    assert not is_nvidias_apex(tmp_path / "theirs")


def test_a_program_that_hangs_is_given_up() -> None:
    assert run_python("-c", "import time; time.sleep(60)", limit_s=0.3) == (1, "no answer within 0 s")
    assert run_python("-c", "print(7)") == (0, "7")
