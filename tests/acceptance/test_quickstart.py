"""The quickstart as a newcomer runs it. Minutes long, so only `scripts/test.sh -m quickstart` and CI run it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.rollout.sglang.tiny import needs_sglang

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

    steps = _metrics(folder)
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


CO_LOCATED = ("rollout.tp=1", "rollout.dp=2")
"""As the quickstart has it: an engine on each of the ranks that train."""
APART = ("rollout.first_rank=2", "rollout.tp=2", "rollout.dp=1")
"""One engine on two ranks of its own."""


@pytest.mark.quickstart
@pytest.mark.timeout(600)
@pytest.mark.sglang
@needs_sglang[1]
@pytest.mark.parametrize("placement", [CO_LOCATED, APART], ids=["co-located tp1", "apart tp2"])
def test_its_ppo_begins_on_sglang_as_on_the_native_engine(placement: tuple[str, ...]) -> None:
    """After the test above, whose SFT checkpoint and run it goes by; the first steps are enough to see a difference."""
    name = f"quickstart_sglang_{len(placement)}_{placement[0][-1]}"
    command = ["scripts/launch.sh", "configs/quickstart/ppo.yaml", f"name={name}", *placement]
    command += ["rollout.engine=sglang", "num_steps=8", "checkpoint.resume=never", "log.tensorboard=false"]
    done = subprocess.run(
        command, cwd=REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    native, sglang = (_metrics(REPO / "runs" / folder) for folder in ("quickstart", name))
    assert [step["step"] for step in sglang] == list(range(9))
    assert max(step["mismatch/max"] for step in sglang[1:]) < 1e-4
    assert all(step["sync/bytes_over_bound"] == 1.0 for step in sglang[1:])
    # The same samples by the same seeds, but where rounding tips one: 2 of 200, then of 256 a step. From step 6 on the
    # actor moves, and what a tipped token teaches spreads.
    assert abs(sglang[0]["held_out/solved"] - native[0]["held_out/solved"]) <= 0.01
    for ours, theirs in zip(sglang[1:7], native[1:7], strict=True):
        assert abs(ours["reward/mean"] - theirs["reward/mean"]) <= 2 / 256
        assert ours["kl/ref"] == pytest.approx(theirs["kl/ref"], abs=1e-3)
    assert sglang[8]["actor/grad_norm"] > 0.0
    assert sglang[8]["kl/ref"] > 0.0


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _prompts(samples: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["split"]].add(sample["prompt"])
    return found
