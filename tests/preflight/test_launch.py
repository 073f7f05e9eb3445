"""What files alone show to be wrong is said before anything starts, through the launcher's door."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.preflight.launch import main
from tests.scripts.launched import CONFIG
from tests.trainers.tiny_run import make_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preflight")
    make_files(made)  # 3 layers, 8 heads, 4 KV heads, MLP 56
    return made


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The message of a refusal."""
    capsys.readouterr()
    assert main([str(arg) for arg in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_it_says_ranks_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.format(nproc=4, folder=tmp_path))
    other = ["--module", "tests.dist.death_worker"]  # needs no model
    assert main([*other, str(config), "name=other"]) == 0
    assert capsys.readouterr().out == f"4\n{tmp_path}/runs/other\n"
    assert "4 ranks on 3 hosts" in said(capsys, *other, "--nnodes", 3, config)
    assert "ranks [4, 5, 6, 7] of 8 belong to no role" in said(capsys, *other, "--nproc", 8, config)
    assert "ranks [4, 5, 6, 7, 8, 9, 10, 11] and 88 more of 100" in said(capsys, *other, "--nproc", 100, config)
    assert "'nowhere' is neither a folder nor" in said(capsys, config)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.parallel.tp=3"], "actor.parallel.tp: 3 does not divide the model's num_kv_heads = 4"),
        (["critic.parallel.tp=16"], "critic.parallel.tp: 16 does not divide the model's num_heads = 8"),
        (
            ["actor.freeze=[model.layers.9.*]"],
            "actor.freeze: 'model.layers.9.*' matches none of the model's 35 weights",
        ),
        (["actor.model.init=actor"], "actor.model.init: actor is for critic and reference"),
        (
            ["critic.model.init=actor", "critic.model.dtype=bfloat16"],
            "critic.model.dtype: bfloat16 differs from actor.model.dtype = float32, and weights are not cast",
        ),
        (["reference.parallel.pp=2"], "reference.parallel.pp: 2 stages do not divide 3 layers"),
        (
            ["actor.parallel.pp=2", "actor.parallel.layers_per_stage=[1,1]"],
            "actor.parallel.layers_per_stage: [1, 1] sums to 2; the model has 3 layers",
        ),
        (["rollout.sampling.stop_token_ids=[7,9999]"], "rollout.sampling.stop_token_ids: [9999] given"),
        (["eval.sampling.stop_token_ids=[-1]"], "eval.sampling.stop_token_ids: [-1] given"),
        (
            ["rollout.sampling.max_new_tokens=41"],
            "data.max_prompt_tokens = 24 make 65 positions; the actor's model was",
        ),
        (["rollout.tp=3"], "rollout.tp: 3 does not divide num_heads = 8"),
        (
            ["rollout.engine=sglang", "rollout.sglang.python=/no/python"],
            "rollout.sglang.python: /no/python is no program",
        ),
        (["rollout.engine=no_such_package:make"], "rollout.engine: no_such_package:make cannot be loaded"),
        (["critic.model.path=/nowhere"], "critic.model.path: '/nowhere' is neither a folder nor a hub id"),
        # its shapes are known here, which is enough for --check and not for a run
        (["critic.model.path=meta-llama/Llama-3.1-405B"], "critic.model.path: 'meta-llama/Llama-3.1-405B' is neither"),
        (["data.path=/nowhere.jsonl"], "data.path: /nowhere.jsonl is not there"),
        (["reward.function=no_such_package.part:score"], "reward.function: no_such_package.part:score cannot be"),
        (["reward.function=no_such.py:score"], "there is no no_such.py"),
        (["log.folder=/proc/1/nowhere"], "log.folder: /proc/1/nowhere/tiny cannot be made"),
    ],
)
def test_a_run_that_cannot_work_is_refused_by_the_name_of_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    assert says in said(capsys, folder / "tiny.yaml", *overrides)


def test_everything_that_is_wrong_is_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("ppo.clip_epss=0.1", "num_steps=x", "foo", "ppo.gamma=2", "eval.every_steps=5", "data.held_out=0"),
        *("actor.parallel.tp=3", "critic.model.path=/nowhere", "data.path=/nowhere.jsonl", "rollout.tp=3"),
        *("rollout.sampling.stop_token_ids=[9999]", "reward.function=no_such.py:score", "reference.parallel.tp=0"),
    ]
    message = said(capsys, "--nproc", 8, folder / "tiny.yaml", *wrong)
    assert message.startswith(f"{folder}/tiny.yaml: 12 settings cannot work:\n")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        *("foo", "num_steps", "reference.parallel.tp", "ppo.clip_epss", "ppo.gamma", "eval.every_steps"),
        *("actor.parallel.tp", "critic.model.path", "data.path", "rollout.sampling.stop_token_ids"),
        *("reward.function", "rollout.tp"),
    ]  # the pools are not compared with 8 ranks while reference.parallel.tp is open
    assert not (folder / "runs").exists()


def test_pools_are_compared_with_the_job_beside_other_faults(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = said(capsys, "--nproc", 2, folder / "tiny.yaml", "rollout.first_rank=2", "ppo.gamma=2")
    assert "ppo.gamma: 2.0 given" in message
    assert "job size: 2 ranks, but pools reach beyond them (rollout 2..2); start 3" in message
    assert "pools: ranks [1] of 2 belong to no role" in message


def test_a_model_is_not_saved_over_one_that_the_run_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = f"save_hf={folder}/rows/../model"
    (folder / "rows").mkdir()
    assert f"save_hf: {folder}/rows/../model is the folder of actor.model.path" in said(
        capsys, folder / "tiny.yaml", over
    )


def test_no_row_may_be_longer_than_a_sliding_window(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windowed = folder / "windowed"
    windowed.mkdir()
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 31}
    (windowed / "config.json").write_text(json.dumps(config))
    argv = [folder / "tiny.yaml", f"critic.model.path={windowed}", "critic.model.init=random"]
    lengths = ["eval.sampling.max_new_tokens=7", "rollout.sampling.max_new_tokens"]
    assert main([*map(str, argv), lengths[0], f"{lengths[1]}=7"]) == 0
    message = said(capsys, *argv, lengths[0], f"{lengths[1]}=8")
    assert "24 make 32 positions; the critic's model has a sliding window of 31; lower one" in message


def test_weights_cut_short_are_found_by_their_header(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = folder / "short"
    short.mkdir()
    (short / "config.json").write_text((folder / "model" / "config.json").read_text())
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(whole[:-100])
    argv = [folder / "tiny.yaml", f"critic.model.path={short}"]
    assert f"{short}/model.safetensors: cannot be read" in said(capsys, *argv)
    (short / "model.safetensors").rename(short / "a.safetensors")
    (short / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert f"{short}/a.safetensors: cannot be read" in said(capsys, *argv)
    assert main([*map(str, argv), "critic.model.init=random"]) == 0  # reads no weights


def test_it_imports_no_torch() -> None:
    code = "import rlhf.preflight.launch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
