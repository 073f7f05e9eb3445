"""A launched run whose engine reports other log-probs than the trainer's ends with 3, and says why."""

import json
import re
from pathlib import Path

import pytest

from tests.scripts.launched import LaunchedJob
from tools.quickstart import make_model_folder


@pytest.mark.dist
def test_a_mismatch_ends_the_job_with_3_and_its_cause(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")
    job = LaunchedJob(
        tmp_path,
        *("configs/debug/ppo_tiny.yaml", "name=death", f"log.folder={tmp_path}/runs"),
        *(f"actor.model.path={tmp_path}/model", "actor.model.init=random", "critic.model.init=random"),
        *("reference.model.init=random", "actor.parallel.dp=2", "data.held_out=0", "job.torch_threads=1"),
        *("rollout.engine=tests.scripts.warm_engine:WarmEngine", "mismatch.on_breach=stop"),
        nproc=2,
        env={},
    )
    code, console, record = job.end(limit_s=120)
    assert (code, record["code"]) == (3, 3), console
    assert record["reason"].startswith("MismatchError: mismatch: step 1: mean |difference| ")
    assert re.search(r"cause: sampling: best: the engine's log-probs are of temperature 1\.(49|5)", record["reason"]), (
        console
    )
    found = job.run_folder / "mismatch" / "step_000001"
    assert json.loads(found.with_suffix(".json").read_text())["cause"] == "sampling"
    assert found.with_suffix(".txt").read_text() in console
