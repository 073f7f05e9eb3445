"""A run as a user starts it under a debugger, `python -m rlhf.train CONFIG`, and what it leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlhf.data.record import PromptRecord
from tests.scripts.launched import REPO
from tests.trainers.tiny_run import make_files


def fails_on_odd_answers(record: PromptRecord, text: str) -> float:
    """A reward that raises for half of the prompts."""
    if int(record.answer) % 2:
        raise ValueError("odd answers are too hard")
    return float(len(text))


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rlhf.train", str(folder / "tiny.yaml"), *overrides]
    return subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)


def lines(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_run_leaves_true_records_and_moves_an_earlier_one_aside(tmp_path: Path) -> None:
    make_files(tmp_path)
    run = tmp_path / "runs" / "tiny"
    (run / "logs").mkdir(parents=True)
    for old in ("config.yaml", "metrics.jsonl", "exit.json"):
        (run / old).write_text("{}\n")
    done = train(
        tmp_path,
        *("reward.function=tests.test_train:fails_on_odd_answers", "eval.every_steps=2", "ppo.critic_warmup_steps=1"),
        *("ppo.epochs=2", "ppo.kl_estimator=k3", "eval.solved_at=3", f"save_hf={tmp_path}/hf"),
        *("actor.freeze=[model.layers.0.*]", "critic.model.init=actor", "reference.model.init=actor"),
        "rollout.engine=rlhf.rollout.native.engine:NativeEngine",  # as another engine is named
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # what libraries warn of is in the log
    assert (tmp_path / "runs" / "tiny.1" / "metrics.jsonl").read_text() == "{}\n"
    assert json.loads((run / "exit.json").read_text())["code"] == 0

    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert ["held_out/solved" in line for line in metrics] == [True, False, True, True]
    assert ["actor/loss" in line for line in metrics] == [False, False, True, True]
    assert [line.get("sync/policy_version") for line in metrics] == [None, 0, 0, 1]
    for line in metrics[1:]:
        assert line["kl/ref"] >= 0  # k3
        assert (line["sync/bytes"], line["sync/bytes_over_bound"]) == (0, 1)
        assert line["time/rollout_s/max"] <= line["time/step_s/max"]  # no evaluation in it
        assert 0 < line["rollout/first_token_p50_s"] <= line["rollout/latency_p50_s"] <= line["rollout/latency_p95_s"]
        assert line["rollout/latency_p95_s"] <= line["time/rollout/generate_s/max"]
        assert 0 < line["rollout/utilisation"] <= 1
        assert line["rollout/decode_tokens_per_s"] > line["rate/rollout_tokens_per_s"] / 2
        assert 0 <= line["rollout/cache_hits"] < 1

    samples = lines(run / "samples.jsonl")
    failed = [sample for sample in samples if int(sample["answer"]) % 2]
    assert failed
    assert all(sample["reward"] is None and "odd answers are too hard" in sample["error"] for sample in failed)
    assert all(not sample["error"] for sample in samples if sample not in failed)
    assert "reshard certificate: 1 ranks, moved 0.00 MiB, lower bound 0.00 MiB, ratio 1.000" in done.stdout
    assert "step 1: " in done.stdout
    assert (
        "have no score and are left out of the losses (reward.on_error); one of them: raised ValueError" in done.stdout
    )
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert f"model       {tmp_path}/hf" in done.stdout
    assert "critic from the actor: reshard certificate: 1 ranks, moved 0.00 MiB" in done.stdout

    assert metrics[3]["mismatch/max"] < 1e-4  # the engine got what training had changed
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "hf"))
    same = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert same == {name for name in after if name.startswith("model.layers.0.")}


def test_faults_of_settings_and_files_are_told_together(tmp_path: Path) -> None:
    make_files(tmp_path)
    done = train(tmp_path, "ppo.clip_eps=-1", "critic.model.path=/nowhere", "rollout.tp=3")
    assert done.returncode == 2
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()[1:]] == [
        *("ppo.clip_eps", "critic.model.path", "rollout.tp"),
    ]
    done = train(tmp_path, "critic.model.path=/nowhere", "rollout.sampling.stop_token_ids=[9999]")
    assert done.returncode == 2
    for key in ("critic.model.path: '/nowhere'", "rollout.sampling.stop_token_ids: [9999]"):
        assert key in done.stderr + done.stdout
