"""`python -m rlhf.train CONFIG --check` through its door: what it prints, what it refuses, what it leaves alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rlhf.preflight import dry_run
from tests.scripts.launched import REPO
from tests.trainers.tiny_run import make_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dry_run")
    make_files(made)  # 3 layers, 8 heads, 4 KV heads, MLP 56
    return made


@pytest.fixture
def check(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Check the tiny run with some words; (exit code, stdout, stderr)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "empty"))

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = dry_run.main([str(folder / "tiny.yaml"), *map(str, words)])
        out, err = capsys.readouterr()
        assert not (folder / "runs").exists()
        return code, out, err

    return run


def test_the_command_prints_the_job_and_leaves_nothing(folder: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "rlhf.train",
        str(folder / "tiny.yaml"),
        "--check",
        "rollout.dp=2",
        "actor.parallel.dp=2",
    ]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parts = done.stdout.split("\n\n")
    starts = [
        "models\n",
        "2 ranks, one node\n",
        "  rank  actor  critic",
        "memory of a rank",
        "one checkpoint: ",
        "one weight sync: 0 between",
    ]
    for part, start in zip(parts, starts, strict=False):
        assert part.startswith(start), done.stdout
    assert "  0  dp0    all     all        engine0\n" in done.stdout
    assert "  1  dp1    -       -          engine1" in done.stdout
    assert done.stdout.endswith("check: nothing wrong\n")
    assert not (folder / "runs").exists()
    done = subprocess.run([*argv, "ppo.gamma=2"], cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "check: 1 thing is wrong:\n  ppo.gamma: 2.0 given; needs 0.0 to 1.0; change it\n"


def test_every_fault_is_told_beside_what_can_be_said(check) -> None:
    code, out, err = check(
        *("ppo.clip_epss=0.1", "critic.parallel.tp=3", "reference.model.path=/nowhere", "eval.every_steps=5"),
        *("data.held_out=0", "rollout.first_rank=1", "--world-size", 4, "--lengths", "12"),
    )
    assert code == 2
    assert [line.split(":")[0].strip() for line in err.splitlines()] == [
        "check",
        *("ppo.clip_epss", "eval.every_steps", "pools", "critic.parallel.tp", "reference.model.path", "--lengths"),
    ]
    assert "check: 6 things are wrong" in err
    assert "pools: ranks [3] of 4 belong to no role" in err
    assert re.search(r"actor +each +0 ", out)
    assert not re.search(r"critic +each", out)  # no rank can hold a third of its heads
    assert "memory: critic is not known and not in the sums" in out
    assert "one weight sync: 0.25 MiB between ranks" in out  # the whole model, from rank 0 to rank 1


def test_a_job_of_the_wrong_size_hides_no_fault_of_its_roles(check) -> None:
    code, out, err = check("actor.parallel.tp=16", "num_steps=x", "actor.optim.lr=abc", "--world-size", 9)
    assert code == 2
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == [
        *("num_steps", "actor.optim.lr", "job size", "--gpus-per-node", "actor.parallel.tp"),
    ]
    assert "job size: 9 ranks, but pools reach beyond them (actor 0..15); start 16" in err
    assert "9 ranks, 2 nodes of 8" in out  # a fault elsewhere leaves the places of roles known
    assert re.search(r"critic +each +0 ", out)
    assert not re.search(r"(actor|rollout) +each", out)
    assert "one weight sync" not in out


def test_transfers_at_the_start_and_frozen_weights_are_counted(check) -> None:
    code, out, err = check(
        *("critic.model.init=actor", "critic.parallel.first_rank=1", "reference.model.init=actor"),
        *("actor.freeze=[model.layers.0.*]", "critic.freeze=[model.*]"),
    )
    assert (code, err) == (0, "")
    assert "critic from the actor, once at the start: 0.25 MiB between ranks, lower bound 0.25 MiB, ratio 1.000" in out
    assert "reference from the actor, once at the start: 0 between ranks" in out
    assert re.search(r"critic +each +1 +65,432 +0.25 MiB +0.50 KiB", out)  # gradient of its head alone, in one bucket


def test_faults_are_told_though_the_report_breaks_off(check, monkeypatch, capsys) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("a bug in a part of the report")

    monkeypatch.setattr("rlhf.preflight.memory.render_memory", broken)
    with pytest.raises(ZeroDivisionError):
        check("ppo.gamma=2")
    out, err = capsys.readouterr()
    assert "1 thing is wrong:\n  ppo.gamma: 2.0 given" in err
    assert out.startswith("models\n")


def test_a_model_without_a_path_is_not_looked_for(check) -> None:
    for words in (["actor.model.path=5"], ["actor.model=5"], ["actor.model.path="]):
        _, _, err = check(*words, "data.path=/nowhere")
        assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == [words[0].split("=")[0], "data.path"]


def test_lengths_beyond_what_the_run_can_have_are_said(check) -> None:
    code, out, _ = check("--lengths", "50:1,20:1", "critic.microbatch_tokens=45")
    assert code == 0
    assert "--lengths: up to 50 tokens, but rows of this run end at data.max_prompt_tokens" in out
    assert re.search(r"rows longer than microbatch_tokens \(\d+ of critic scores, \d+ of critic update\) are", out)


def test_pools_that_are_not_known_are_not_placed(check) -> None:
    code, out, err = check("critic.parallel.tp=0", "ppo.minibatch_samples=0", "rollout.kv_cache_tokens=0")
    assert code == 2
    assert [line.split(":")[0].strip() for line in err.splitlines()[1:]] == [
        *("critic.parallel.tp", "rollout.kv_cache_tokens", "ppo.minibatch_samples"),
    ]
    assert out.startswith("models\n")
    assert "ranks" not in out
    code, out, err = check("ppo.minibatch_samples=0", "rollout.kv_cache_tokens=0", "actor.model.dtype=float8")
    assert len(err.splitlines()) == 4
    assert re.search(r"critic +each +0 ", out)
    assert not re.search(r"(actor|rollout) +each", out)
    assert "microbatches" not in out


def test_a_broken_file_and_broken_options_end_with_2(check, tmp_path: Path) -> None:
    assert dry_run.main([str(tmp_path / "none.yaml")]) == 2
    assert dry_run.main([]) == 2
    for words in (
        ["--world-size", "0"],
        ["--gpus-per-node", "x"],
        ["--nonsense"],
        ["--gpu-memory", "nan"],
        ["--gpu-memory=-5"],
    ):
        with pytest.raises(SystemExit) as left:
            check(*words)
        assert left.value.code == 2
    code, _, err = check("rollout.dp=9", "--gpus-per-node", 8)
    assert code == 2
    assert "--gpus-per-node: 9 ranks on nodes of 8" in err


def test_a_weight_that_a_checkpoint_lacks_or_has_in_another_shape_is_named(check, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder / "model", other)
    weights = load_file(other / "model.safetensors")
    up, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "down"))
    save_file({name: weight for name, weight in weights.items() if name != up}, other / "model.safetensors")
    code, _, err = check(f"reference.model.path={other}")
    assert code == 2
    assert f"{other}: no tensor {up}; needs it for this model; check that model.path is complete" in err
    assert check(f"reference.model.path={other}", "reference.model.init=random")[0] == 0  # reads none

    save_file({**weights, down: weights[down].T.copy()}, other / "model.safetensors")
    code, _, err = check(f"critic.model.path={other}")  # it lacks a value head too, which starts from the seed
    assert code == 2
    assert f"{other}: {down} has shape (56, 40); needs (40, 56); check that config.json belongs to these weights" in err


def test_help_has_examples(check, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        dry_run.main(["--help"])
    assert left.value.code == 0
    assert "--check --world-size 128 --gpus-per-node 8" in capsys.readouterr().out


def test_a_hub_id_is_looked_at_by_its_published_shapes_and_said(check) -> None:
    hub_id = "meta-llama/Meta-Llama-3-8B"
    code, out, _ = check(f"critic.model.path={hub_id}", f"reference.model.path={hub_id}")
    assert code == 0
    assert f"critic.model.path, reference.model.path: {hub_id} is not in the local cache" in out
    assert f"`hf download {hub_id}`" in out
    assert re.search(rf"reference +{hub_id} +8,030,261,248", out)
    assert re.search(
        rf"critic +{hub_id} +7,504,928,768", out
    )  # without lm head, with a row of values: 4096 * 128255 fewer
    for unknown in ("someone/unknown-8b", "llama3-8b"):  # a short name is no path that a run could load
        code, _, err = check(f"critic.model.path={unknown}")
        assert code == 2
        assert f"critic.model.path: {unknown!r} is neither a folder nor a hub id" in err


def test_a_model_with_experts_is_looked_at_and_its_layout_checked(check) -> None:
    hub_id = "Qwen/Qwen3-30B-A3B"
    words = (f"reference.model.path={hub_id}", "reference.parallel.dp=2")
    code, out, _ = check(*words, "reference.parallel.ep=2")
    assert code == 0
    assert re.search(rf"reference +{hub_id} +30,532,122,624", out)
    assert re.search(r"reference +0-1 +0 +dp2 ep2 ", out)
    held = 30_532_122_624 - 48 * 64 * 3 * 2048 * 768  # without 64 of the 128 experts of each layer
    assert re.search(rf"reference +each +0 +{held:,} ", out)
    code, _, err = check(*words, "reference.parallel.etp=2", "critic.parallel.ep=3")
    assert code == 2
    assert "critic.parallel.ep: ep*etp = 3*1 = 3 given; needs a divisor of tp*dp" in err


def test_memory_beyond_the_gpu_is_a_fault(check) -> None:
    words = ("actor.model.path=Qwen/Qwen3-8B", "rollout.tp=1")
    code, out, err = check(*words, "--gpu-memory", 80)
    # fp32: 30.5 GiB of weights and as much of gradients, twice as much of moments; the engine's weights again and, on
    # a CPU, packed copies of its matrices (28.2 GiB: all but the embedding)
    assert code == 2
    assert "--gpu-memory: rank 0 holds 18" in err
    assert "needs less than 80 GiB" in err
    code, out, _ = check(*words, "--gpu-memory", 200)
    assert code == 0
    assert "memory: the fullest rank while training is 0" in out


def test_fine_tuning_has_one_role_and_no_sync(check, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft = folder / "sft.yaml"
    sft.write_text(
        f"name: s\ntrainer: sft\nactor: {{model: {{path: {folder}/model}}, parallel: {{dp: 2}}}}\n"
        f"data: {{source: jsonl, path: {folder}/rows.jsonl, max_prompt_tokens: 20}}\nsft: {{batch_samples: 9}}\n"
    )
    assert dry_run.main([str(sft), "--lengths", "10:1,20:2"]) == 0
    out, _ = capsys.readouterr()
    assert "one weight sync" not in out
    assert "9 rows of 10 to 20 tokens, mean 17" in out
    assert re.search(r"actor update +1 +4-5 +1 ", out)


def test_an_engine_by_import_path_is_not_guessed_at(check) -> None:
    code, out, _ = check("rollout.engine=rlhf.rollout.native.engine:NativeEngine")
    assert code == 0
    assert "rlhf.rollout.native.engine:NativeEngine is not asked" in out
    assert "one weight sync" not in out


def test_the_sync_into_sglang_is_planned_and_its_memory_is_not_guessed_at(
    check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.preflight.inputs.check_installed", lambda options: None)  # as where it is installed
    code, out, _ = check("rollout.engine=sglang", "job.device=cuda")
    assert code == 0
    assert "one weight sync" in out
    assert "memory: rollout is not known and not in the sums" in out


def test_what_sglang_cannot_do_is_refused_before_anything_starts(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = check("rollout.engine=sglang")
    assert code == 2
    assert "run scripts/setup.sh core sglang" in err
    code, _, err = check("rollout.engine=sglang", "rollout.sglang.python=/no/such/python")
    assert code == 2
    assert "rollout.sglang.python: /no/such/python is no program" in err


def test_what_sglang_has_on_gpus_only_is_refused_where_the_job_is_on_cpus(
    check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.preflight.inputs.check_installed", lambda options: None)  # as where it is installed
    words = ("rollout.engine=sglang", "rollout.sglang.attention_backend=fa3", "rollout.sglang.mem_fraction_static=0.7")
    code, out, err = check(*words, "job.device=cpu")
    assert code == 2
    assert "without effect on a CPU: mem_fraction_static=0.7 (rollout.kv_cache_tokens alone" in out
    assert "rollout.sglang.attention_backend: fa3 given on a CPU" in err
    assert "ffn_size = 56 on a CPU, where SGLang pads each share to a multiple of 32" in err
    code, out, _ = check(*words, "job.device=cuda")
    assert code == 0
    assert "without effect" not in out


def test_engines_of_sglang_may_cross_nodes_where_they_have_as_many_ranks_on_each(
    check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.preflight.inputs.check_installed", lambda options: None)  # as where it is installed
    words = ("rollout.engine=sglang", "rollout.tp=4", "job.device=cuda", "--world-size", "6", "--gpus-per-node", "3")
    code, out, err = check(*words, "rollout.first_rank=1", "reference.parallel.first_rank=5")
    assert code == 0, err
    assert "rollout: 1 of 1 tp groups cross nodes" in out
    code, _, err = check(*words, "reference.parallel.first_rank=4", "reference.parallel.dp=2")
    assert code == 2
    assert "tp ranks lie on hosts node 0, node 0, node 0, node 1; needs as many on each host" in err
