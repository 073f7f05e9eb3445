"""Bytes of a sync that a check, and the command that plans it, foretell against those that a real WeightSync counts."""

import json
from pathlib import Path

import torch

from rlhf.config.load import load_config
from rlhf.families.registry import hf_config
from rlhf.preflight.sync import sync_certificate, sync_layouts
from rlhf.reshard.stats import ReshardStats
from rlhf.reshard.topology import Topology
from tests.harness.ranks import run_ranks
from tests.mcore.stand_in import tiny_spec
from tests.preflight.sync_ranks import sync_all
from tests.reshard.gloo import as_table
from tools import plan_reshard

SPEC = tiny_spec(hidden_size=18, ffn_size=28)
CONFIG = """
name: one
trainer: ppo
actor: {model: {path: a}, parallel: {tp: 2, pp: 2}}
critic: {model: {path: a}}
reference: {model: {path: a}}
rollout: {tp: 2, dp: 2}
data: {source: jsonl, path: rows.jsonl}
reward: {function: "mine:score"}
"""
CASES = (
    (),
    ("rollout.tp=4", "rollout.dp=1", "actor.model.dtype=bfloat16"),
    ("rollout.tp=1", "rollout.dp=1", "rollout.first_rank=3", "actor.parallel.pp=1"),
)


def test_bytes_are_those_that_move(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    topology = Topology.blocks(4, ranks_per_node=2)
    configs = [load_config([str(tmp_path / "c.yaml"), *overrides]) for overrides in CASES]
    told = [sync_certificate(config, SPEC, topology) for config in configs]
    pairs = [tuple(map(as_table, sync_layouts(config, SPEC))) for config in configs]
    run_ranks(4, sync_all, pairs, tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(hf_config(SPEC)))
    for overrides, certificate in zip(CASES, told, strict=True):
        model = f"actor.model.path={tmp_path / 'a'}"
        args = [str(tmp_path / "c.yaml"), *overrides, model, "--gpus-per-node", "2", "--json", str(tmp_path / "plan")]
        assert plan_reshard.main(args) == 0
        planned = json.loads((tmp_path / "plan").read_text())
        assert planned["by_link"] == {link.value: count for link, count in certificate.bytes_by_link().items()}
        assert planned["bound"] == certificate.bound
    moved = [ReshardStats(*found, 0.0) for found in torch.load(tmp_path / "stats", weights_only=False)]
    for certificate, stats in zip(told, moved, strict=True):
        assert certificate.bytes_by_link() == stats.received
        assert certificate.moved == certificate.bound == stats.moved == stats.bound > 0
