"""The quickstart as a newcomer runs it. Minutes long, so only `scripts/test.sh -m quickstart` and CI run it."""

import json
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.quickstart
@pytest.mark.timeout(1500)
def test_ppo_solves_more_held_out_problems_than_the_checkpoint_it_starts_from() -> None:
    done = subprocess.run(
        ["scripts/quickstart.sh"], cwd=REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-4000:]

    folder = REPO / "runs" / "quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    before, after, problems = (summary[k] for k in ("held_out_before", "held_out_after", "held_out_problems"))
    error = ((before * (1 - before) + after * (1 - after)) / problems) ** 0.5
    assert problems == 200
    assert after - before >= max(0.15, 2 * error), f"{before} -> {after}, standard error {error:.3f}"

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(summary["steps"] + 1))
    assert max(step["mismatch/max"] for step in steps[1:]) < 1e-4
    assert all(step["sync/bytes_over_bound"] == 1.0 for step in steps[1:])
    prompts = _prompts(folder / "samples.jsonl")
    assert prompts["train"]
    assert prompts["held_out"]
    assert not prompts["train"] & prompts["held_out"]
    assert json.loads((folder / "exit.json").read_text())["code"] == 0
    for name in ("config.yaml", "curves.png", "logs/rank_0.log", "logs/rank_1.log"):
        assert (folder / name).stat().st_size > 0, name
    for words in ("held-out problems", "reward by step", "sample 3", "run folder", "try next"):
        assert words in done.stdout, words


def _prompts(samples: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["split"]].add(sample["prompt"])
    return found
