"""Our side of the PPO benchmark: a job as users start it, by scripts/launch.sh; times come from its metrics.jsonl."""

import json
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.alone import run_alone
from tools.benchmarks.compare import Options
from tools.benchmarks.ppo_work import PPOWork, Steps
from tools.benchmarks.work import PROMPT_TOKENS

SLOT_MARGIN = 16
"""Tokens that the engine rounds a slot up by at most."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How our side uses the cores."""

    ranks: int
    threads: int
    """Of each rank."""

    @property
    def name(self) -> str:
        """In rows."""
        return f"dp{self.ranks}"


def run_ours(work_file: Path, work: PPOWork, model: Path, layout: Layout, options: Options) -> Steps:
    """Run the job.

    Raises:
        SideError: It failed.
    """
    name, folder = f"ppo_{work_file.stem}_{layout.name}", options.folder / "runs"
    rows = options.folder / f"{name}.jsonl"
    texts = json.loads(work_file.read_text(encoding="utf-8"))["texts"]
    tokenizer = str(model / "tokenizer.json")
    rows.write_text("".join(json.dumps({"prompt": text, "tokenizer": tokenizer}) + "\n" for text in texts))
    config = options.folder / f"{name}.yaml"  # JSON is YAML
    config.write_text(json.dumps(_config(name, work, model, rows, layout, options.runs + 1, folder)), encoding="utf-8")
    command = ["scripts/launch.sh", "--python", options.python, str(config)]
    peak_mib = run_alone(name, command, log=options.folder / f"{name}.log", prefix=options.run_prefix)
    return _steps(folder / name / "metrics.jsonl", work, peak_mib)


def _config(
    name: str, work: PPOWork, model: Path, rows: Path, layout: Layout, steps: int, folder: Path
) -> dict[str, object]:
    trained = {
        "model": {"path": str(model)},
        "parallel": {"dp": layout.ranks},
        "optim": {"lr": work.lr, "beta2": 0.999},
        "microbatch_tokens": work.microbatch * (PROMPT_TOKENS + work.new_tokens),
    }
    running = work.responses // layout.ranks
    return {
        "name": name,
        "trainer": "ppo",
        "num_steps": steps,
        "actor": trained,
        "critic": trained,
        "reference": {"model": {"path": str(model)}, "parallel": {"dp": layout.ranks}},
        "rollout": {
            "dp": layout.ranks,
            "max_running": running,
            "kv_cache_tokens": max(16, running) * (PROMPT_TOKENS + work.new_tokens + SLOT_MARGIN),
            "sampling": {"max_new_tokens": work.new_tokens, "ignore_eos": True},
        },
        "data": {
            "source": "jsonl",
            "path": str(rows),
            "chat_template": False,
            "max_prompt_tokens": PROMPT_TOKENS,
            "overlong": "error",
            "shuffle": False,
            "held_out": 0,
        },
        "reward": {"function": "tools.benchmarks.even_reward:score"},
        "ppo": {
            "prompts_per_step": work.num_prompts,
            "samples_per_prompt": work.samples,
            "minibatch_samples": work.minibatch,
            "kl_coef": work.kl_coef,
        },
        "eval": {"sampling": {"max_new_tokens": work.new_tokens}},
        "job": {"device": "cpu", "torch_threads": layout.threads},
        "log": {"folder": str(folder), "tensorboard": False},
    }


def _steps(metrics: Path, work: PPOWork, peak_mib: int) -> Steps:
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    measured = [line for line in lines if "time/step_s/max" in line][1:]
    for line in measured:
        assert line["length/response_mean"] == work.new_tokens, "a response ended early"
        assert line["length/prompt_mean"] == PROMPT_TOKENS, "a prompt has other tokens than the peers'"
        assert not line["reward/failed"], "the reward function failed"

    def seconds(phase: str) -> tuple[float, ...]:
        return tuple(line.get(f"time/{phase}_s/max", 0.0) for line in measured)

    total, generate = seconds("step"), seconds("rollout")
    train = tuple(a + b for a, b in zip(seconds("update/actor"), seconds("update/critic"), strict=True))
    fine = sorted({key.split("/", 1)[1].removesuffix("_s/max") for key in measured[0] if key.endswith("_s/max")})
    return Steps(
        total=total,
        phases={
            **{phase: seconds(phase) for phase in fine},
            "generate": generate,
            "train": train,
            "score": tuple(t - g - u for t, g, u in zip(total, generate, train, strict=True)),
        },
        peak_mib=peak_mib,
    )
