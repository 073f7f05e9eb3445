"""Timelines of steps that a run was asked for, on 4 ranks with a layout for each role; one spawn for all of it."""

import json
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet

from rlhf.build.loops import build_loop
from rlhf.config.load import load_config
from rlhf.dist.groups import GroupFactory
from tests.harness.ranks import run_ranks
from tests.metrics.chrome_trace import check_trace, intervals
from tests.trainers.tiny_run import load, make_files, ranks_here

LAYOUTS = (
    *("rollout.tp=2", "rollout.dp=2", "critic.parallel.tp=4", "reference.parallel.dp=4"),
    *("actor.parallel.tp=2", "actor.parallel.pp=2", "actor.parallel.layers_per_stage=[2,1]"),
)
SFT = """
name: sft
trainer: sft
num_steps: 2
actor: {{model: {{path: {model}}}, parallel: {{dp: 4}}, microbatch_tokens: 90}}
data: {{source: jsonl, path: {rows}, chat_template: false, max_prompt_tokens: 24, held_out: 4}}
sft: {{batch_samples: 8}}
job: {{device: cpu}}
log: {{folder: {folder}/runs, tensorboard: false, console: plain}}
profile: {{steps: [2], torch: true}}
"""
OUTSIDE = {"profile"}  # a phase that a step's line has, but not its timeline


def _runs(folder: Path) -> None:
    torch.set_num_threads(1)
    groups = GroupFactory(device_backend="gloo", timeout=timedelta(seconds=120))
    looked_at = ("profile.steps=[1,3]", "sync.bucket_bytes=4096", "log.samples_every_steps=2")
    asked = load(folder, *LAYOUTS, *looked_at, "num_steps=3", "data.held_out=0", "name=ppo")
    build_loop(asked, ranks_here(folder / "runs" / "ppo", groups)).run()
    quiet = build_loop(load(folder, *LAYOUTS, "name=quiet"), ranks_here(folder / "runs" / "quiet", groups))
    assert quiet.models.actor.model.config.timers is None  # Megatron's own timers are as without us
    build_loop(load_config([str(folder / "sft.yaml")]), ranks_here(folder / "runs" / "sft", groups)).run()
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled")
    make_files(path)
    (path / "sft.yaml").write_text(SFT.format(model=path / "model", rows=path / "rows.jsonl", folder=path))
    run_ranks(4, _runs, path)
    return path / "runs"


def trace_of(folder: Path, run: str, step: int) -> dict:
    return json.loads((folder / run / "timeline" / f"step_{step:06d}.json").read_text())


@pytest.mark.dist
@pytest.mark.parametrize("step", [1, 3])
def test_a_trace_holds_every_rank_and_its_phases_are_the_metrics(folder: Path, step: int) -> None:
    trace = trace_of(folder, "ppo", step)
    check_trace(trace)
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
    line = next(of for of in map(json.loads, (folder / "ppo/metrics.jsonl").open()) if of["step"] == step)
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    for rank in range(4):
        for name, duration in intervals(trace, rank, "phase"):
            seconds[name][rank] = seconds[name].get(rank, 0.0) + duration
    timed = {name.split("/", 1)[1].removesuffix("_s/mean") for name in line if name.endswith("_s/mean")} - OUTSIDE
    assert set(seconds) == timed
    assert {"update/actor", "update/critic", "score/reference", "rollout/sync", "reward", "step"} <= timed
    for phase, of in seconds.items():
        for part, value in (("min", min(of.values())), ("mean", sum(of.values()) / len(of)), ("max", max(of.values()))):
            assert line[f"time/{phase}_s/{part}"] == pytest.approx(value, abs=1e-8)  # the file has whole nanoseconds


@pytest.mark.dist
def test_spans_show_microbatches_messages_buckets_and_waits(folder: Path) -> None:
    trace = trace_of(folder, "ppo", 3)
    for rank in range(4):
        work = [name for name, _ in intervals(trace, rank, "work")]
        waits = [name for name, _ in intervals(trace, rank, "wait")]
        assert {"forward", "backward", "optimizer", "pack", "unpack bucket 0", "send results of critic"} <= set(work)
        assert {"rows for actor", "rows for critic", "count tokens", "all-grads-sync", "rows to leave"} <= set(waits)
        assert ("forward-recv" in waits or "backward-send-forward-recv" in waits) == (rank >= 2)  # stage 1
        assert ("backward-recv" in waits or "forward-send-backward-recv" in waits) == (rank < 2)  # stage 0
    assert any("bucket 1" in [name for name, _ in intervals(trace, rank, "wait")] for rank in range(4))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    tracks = {names[e["pid"], e["tid"]] for e in trace["traceEvents"] if e["name"] == "backward"}
    assert tracks == {"actor", "critic"}


@pytest.mark.dist
def test_only_the_steps_asked_for_are_written(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "ppo/timeline").iterdir()) == [
        f"step_00000{step}.{ending}" for step in (1, 3) for ending in ("json", "png")
    ]


@pytest.mark.dist
def test_only_the_steps_that_are_due_are_dumped(folder: Path) -> None:
    assert [path.name for path in (folder / "ppo/samples").iterdir()] == ["step_000002.parquet"]
    assert parquet.read_metadata(folder / "ppo/samples/step_000002.parquet").num_rows == 10


@pytest.mark.dist
def test_fine_tuning_has_timelines_too_and_torch_traces_of_each_rank(folder: Path) -> None:
    check_trace(trace_of(folder, "sft", 2))
    assert {"forward", "backward", "optimizer"} <= {
        name for name, _ in intervals(trace_of(folder, "sft", 2), 3, "work")
    }
    written = sorted(path.name for path in (folder / "sft/timeline").iterdir())
    assert written == ["step_000002.json", "step_000002.png", *(f"step_000002_rank_{rank}.json" for rank in range(4))]
    events = json.loads((folder / "sft/timeline/step_000002_rank_3.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
