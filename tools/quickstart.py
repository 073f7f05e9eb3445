"""The quickstart: teach a tiny model some arithmetic by examples, then let PPO improve it on fresh problems.

    ./scripts/quickstart.sh                      all of it, under 6 minutes on 2 cores
    ./scripts/quickstart.sh ppo.kl_coef=0.05     the same with another setting of PPO
    ./scripts/quickstart.sh rollout.engine=sglang name=on_sglang    PPO's answers from SGLang, installed first

Two jobs of 2 ranks each, started as any other job is: scripts/launch.sh configs/quickstart/{sft,ppo}.yaml.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import reasoning_gym

from rlhf.config.load import load_config
from rlhf.data.tokenizer import tiny_tokenizer
from rlhf.families.registry import hf_config
from rlhf.families.spec import ModelSpec

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / ".cache" / "quickstart"
PPO = "configs/quickstart/ppo.yaml"
ROLES = ("actor", "critic", "reference")

TINY = ModelSpec(
    family="qwen3",
    vocab_size=0,  # that of the tokenizer
    hidden_size=128,
    ffn_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_positions=256,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    init_std=0.05,
)
"""About a million parameters."""


def main(argv: Sequence[str]) -> int:
    """Exit code of the job that failed, or 0."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of configs/quickstart/ppo.yaml")
    args = parser.parse_args(argv)
    make_model_folder(FOLDER / "init")
    code = check_ppo(FOLDER / "init", *args.overrides)
    if code:
        return code
    print("1/2  a model of about a million parameters learns some arithmetic from answers", flush=True)
    code = launch("configs/quickstart/sft.yaml")
    if code:
        return code
    print("\n2/2  PPO: the model answers fresh problems and learns from what a checker says of them", flush=True)
    return launch(PPO, *args.overrides)


def make_model_folder(folder: Path) -> None:
    """A Hugging Face folder without weights: config.json and a byte-level tokenizer that knows the task's wording."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(folder, task_wording(), vocab_size=320)
    spec = replace(TINY, vocab_size=len(tokenizer))
    config = {**hf_config(spec), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def task_wording() -> list[str]:
    """Some questions of the task, so that its fixed words become few tokens."""
    data = load_config([str(REPO / "configs/quickstart/sft.yaml")]).data
    task = reasoning_gym.create_dataset(data.task, size=64, seed=0, **data.task_options)
    return [entry["question"] for entry in task]


def check_ppo(model: Path, *overrides: str) -> int:
    """Refuse what is wrong with PPO before the job that makes its model; `model` is a folder like that one's."""
    models = [f"{role}.model.{key}" for role in ROLES for key in (f"path={model}", "init=random")]
    program = [sys.executable, "-m", "rlhf.preflight", PPO, *overrides, *models]  # as the launcher asks later
    return subprocess.run(program, cwd=REPO, stdout=subprocess.DEVNULL, check=False).returncode


def launch(config: str, *overrides: str) -> int:
    """Run a job to its end, as a user would."""
    return subprocess.run([str(REPO / "scripts/launch.sh"), config, *overrides], cwd=REPO, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
