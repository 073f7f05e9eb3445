"""The command that studies a weight sync: what it counts is what is proved, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from rlhf.config.parallel import ParallelConfig
from rlhf.families.registry import hf_config
from rlhf.families.spec import Head
from rlhf.mcore.layout import megatron_layout
from rlhf.reshard.check import certify
from rlhf.reshard.plan import make_plan
from rlhf.reshard.topology import Link, Topology
from rlhf.rollout.native.layout import native_layout
from tests.mcore.stand_in import tiny_spec
from tools.plan_reshard import main

SPEC = tiny_spec(num_layers=5)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(SPEC)))
    return str(folder)


def test_figures_are_those_of_the_certificate(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Uneven stages, pools that overlap in part, engines of another tp, nodes of three."""
    sizes = ["--src", "tp2,pp3,first_rank1", "--dst", "tp4,dp2,first_rank2", "--engine", "native"]
    args = [*sizes, "--gpus-per-node", "3", "--dtype", "float32"]
    files = [tmp_path / "plan.json", tmp_path / "plan.png"]
    assert main(["--model", model, *args, "--json", str(files[0]), "--out", str(files[1])]) == 0
    parallel = ParallelConfig(tp=2, pp=3, first_rank=1, layers_per_stage=(2, 2, 1))
    src = megatron_layout(SPEC, parallel, head=Head.LM, dtype="float32")
    dst = native_layout(SPEC, tp=4, dp=2, first_rank=2, dtype="float32")
    proved = certify(make_plan(src, dst, Topology.blocks(10, ranks_per_node=3)))
    told = json.loads(files[0].read_text())
    assert told["moved"] == told["bound"] == proved.moved == proved.bound > 0
    assert told["by_link"] == {link.value: count for link, count in proved.bytes_by_link().items()}
    assert told["ranks"] == [
        {
            "rank": one.rank,
            "bound": one.bound,
            "received": {link.value: one.received[link] for link in Link},
            "sent": {link.value: one.sent[link] for link in Link},
        }
        for one in proved.ranks
    ]
    assert told["src"]["layers_per_stage"] == [2, 2, 1]
    assert files[1].read_bytes().startswith(PNG)
    said = capsys.readouterr().out
    assert "ratio 1.000" in said
    assert "HybridFlow (micro-dp groups) assumes" in said
    assert f"picture: {files[1]}" in said


def test_known_models_and_their_bandwidths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tp4 into engines of tp2 in one node: ranks 1 and 2 get half of the model, at 10 GB/s."""
    file = tmp_path / "plan.json"
    args = ["--model", "llama3-8b", "--src", "tp4", "--dst", "tp2", "--intra-node-gbps", "80", "--json", str(file)]
    assert main(args) == 0
    told = json.loads(file.read_text())
    assert told["predicted"]["seconds"] == pytest.approx(told["model_bytes"] / 2 / 10e9, rel=0.01)
    assert told["predicted"]["rank"] in (1, 2)
    ways = {way["name"]: way for way in told["ways"]}
    assert ways["full_gather"]["received_mean"] == 0.75 * told["model_bytes"]
    assert ways["hybridflow"]["received_mean"] == 0.25 * told["model_bytes"]
    assert ways["ours"]["received_mean"] == told["moved"] / 4
    assert "HybridFlow receives" in capsys.readouterr().out


def test_each_block_crosses_into_a_node_once_if_told(tmp_path: Path, model: str) -> None:
    """One training rank, two engines of one rank each on the node beside it: the second takes all from the first."""
    told = []
    for fanout in ("direct", "node"):
        args = ["--src", "tp1", "--dst", "tp1,dp2,first_rank2", "--gpus-per-node", "2", "--fanout", fanout]
        assert main(["--model", model, *args, "--json", str(tmp_path / "plan")]) == 0
        told.append(json.loads((tmp_path / "plan").read_text()))
    direct, once = told
    assert direct["by_link"]["across nodes"] == 2 * once["by_link"]["across nodes"] == 2 * once["bound_across_nodes"]
    assert once["by_link"]["same node"] == once["model_bytes"]
    assert direct["moved"] == once["moved"] == 2 * once["model_bytes"]


def test_a_runs_config_says_its_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    small = ["actor.parallel.pp=1", "actor.parallel.dp=1", "rollout.dp=1", "actor.model.path=llama3-8b"]
    assert main(["configs/llama3_70b/ppo.yaml", *small, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert (told["src"]["tp"], told["dst"]["tp"], told["dst"]["dp"]) == (8, 8, 1)
    assert told["dtype"] == "bfloat16"
    assert told["by_link"]["same rank"] > 0.99 * told["model_bytes"]  # all but where the vocabulary is padded
    assert "8 engines" not in (said := capsys.readouterr().out)
    assert "1 engine of tp8 on ranks 0-7 (native)" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "command line: needs either CONFIG.yaml [KEY=VALUE ...] or --model"),
        (["--model", "llama3-8b", "--src", "tp8"], "--dst: not given"),
        (["--model", "llama9-8b", "--src", "tp8", "--dst", "tp8"], "--model: 'llama9-8b' is neither known here nor"),
        (["--model", "llama3-8b", "--src", "tp8,pp0", "--dst", "tp8"], "--src: 'pp0' in 'tp8,pp0'; needs at least 1"),
        (["--model", "llama3-8b", "--src", "tp3", "--dst", "tp8"], "--src.tp: 3 does not divide"),
        (["--model", "llama3-8b", "--src", "tp8", "--dst", "tp3"], "--dst.tp: 3 given for num_heads = 32"),
        (["configs/debug/sft_tiny.yaml"], "has no engines; needs a run with a rollout"),
        (["--model", "llama3-8b", "--src", "tp1", "--dst", "tp1", "--out", "/no/such/p.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_one_error_and_exit_2(args, message, capsys) -> None:
    assert main(args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("args", [["--gpus-per-node", "0"], ["--inter-node-gbps", "fast"], ["--engine", "vllm"]])
def test_bad_options_exit_with_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", "llama3-8b", *args])
    assert left.value.code == 2
    assert args[1] in capsys.readouterr().err
