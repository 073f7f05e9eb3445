"""configs/smollm2_135m on a stand-in of the same kind: the path of the long run, in seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.families.gguf import GgufFile
from tests.tools.tiny_smollm import tiny_gguf
from tools.fetch_smollm2 import convert

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.dist
def test_the_config_runs_through_the_chat_template(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    convert(GgufFile(tmp_path / "tiny.gguf"), tmp_path / "model")
    small = ["num_steps=3", "data.held_out=16", "data.max_prompt_tokens=256", "eval.every_steps=0"]  # a token a byte
    small += [f"actor.model.path={tmp_path}/model", f"log.folder={tmp_path}", "name=run", "log.tensorboard=false"]
    done = subprocess.run(
        ["scripts/launch.sh", "configs/smollm2_135m/ppo.yaml", *small, "job.torch_threads=1"],
        cwd=REPO,
        env={**os.environ, "RLHF_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert samples
    for sample in samples:
        assert sample["prompt"].startswith("<|im_start|>system\n")
        assert sample["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert max(step["mismatch/max"] for step in steps[1:]) < 1e-4  # float32 on both sides, log-probs of 263 tokens
    assert steps[-1]["actor/grad_norm"] > 0.0
