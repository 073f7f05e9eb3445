"""Resharding: our weight sync against gathering whole shards and slicing, over the same gloo groups in the same run.

Also against what gloo and memory allow for the same bytes, and, from one Megatron layout into another, against
Megatron-Core's own resharding.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from rlhf.config.parallel import ParallelConfig
from rlhf.families.spec import ModelSpec
from tools.benchmarks import reshard_ranks
from tools.benchmarks.compare import MIB, Options
from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row, number

SAMPLE_TARGET = 0.95
"""Least ratio of a transfer that compares nothing to one that compares a sample."""
LIMIT_TARGET = 0.7
"""Of gloo's rate for the same bytes, wherever the gathers have a target."""


@dataclass(frozen=True, slots=True)
class Cut:
    """From a training layout to engines on the same ranks."""

    src: ParallelConfig
    engine_tp: int
    stride: int = 1
    """Of the ranks of an engine; see rollout.stride."""
    target: float | None = None
    """Against the fastest gather; cuts that have one are those of --quick, and of Megatron-Core's resharding."""

    @property
    def engines(self) -> int:
        """As many as fill the ranks."""
        return self.src.num_ranks // self.engine_tp


CUTS = {
    "tp4-tp2": Cut(ParallelConfig(tp=4), 2, target=3.0),
    "tp4-tp2-strided": Cut(ParallelConfig(tp=4), 2, stride=2, target=3.0),
    "tp4-tp1": Cut(ParallelConfig(tp=4), 1),
    "tp2pp2-tp2": Cut(ParallelConfig(tp=2, pp=2), 2),
    "tp2dp2-tp4": Cut(ParallelConfig(tp=2, dp=2), 4),
    "tp4pp2-tp2": Cut(ParallelConfig(tp=4, pp=2), 2),
}
"""Training layout and the tensor-parallel size of the engines; names of rows. The last has eight ranks."""

MEGATRON_CUTS = ("tp4-tp2", "tp4pp2-tp2")
"""Measured from Megatron to Megatron too."""


def model(*, quick: bool) -> ModelSpec:
    """A Llama of 0.17 billion parameters (quick: 3 million)."""
    return ModelSpec(
        family="llama",
        vocab_size=4_000 if quick else 32_000,
        hidden_size=128 if quick else 1024,
        ffn_size=352 if quick else 2816,
        num_layers=8,
        num_heads=16,
        num_kv_heads=8,
        head_dim=8 if quick else 64,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_positions=2048,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
    )


def run(options: Options, report: Report) -> None:
    """Rows `reshard/CUT` in seconds: the transfer alone, against the fastest gather. See README.md for the others."""
    for name, cut in CUTS.items():
        if options.quick and not cut.target:
            continue
        to_engines = options.wants(f"reshard/{name}")
        to_megatron = name in MEGATRON_CUTS and options.wants(f"reshard/{name}/megatron")
        found = _measured(cut, options, to_engines=to_engines, to_megatron=to_megatron)
        if to_engines:
            _compare(f"reshard/{name}", cut, found["engines"], report)
            if options.profile:
                report.note(found["engines"]["profile"])
        if to_megatron:
            _compare_megatron(f"reshard/{name}/megatron", found["megatron"], report)


def _compare(name: str, cut: Cut, found: dict[str, Any], report: Report) -> None:
    seconds = {way: Runs(tuple(runs)) for way, runs in found["seconds"].items()}
    ours, limits = reshard_ranks.OURS, (reshard_ranks.PEER_LIMIT, reshard_ranks.COPY_LIMIT)
    peers = [way for way in seconds if way not in (ours, reshard_ranks.SAMPLED, reshard_ranks.VERIFIED, *limits)]
    best = min(peers, key=lambda way: seconds[way].median)
    _against(report, name, seconds, ours, best, target=cut.target)
    _against(report, f"{name}/sampled", seconds, reshard_ranks.SAMPLED, ours, target=SAMPLE_TARGET)
    _against(report, f"{name}/verified", seconds, reshard_ranks.VERIFIED, best)
    for way in peers:
        report.add(Row(name=f"{name}/{way}", value=_s(seconds[way]), unit="s", spread=seconds[way].spread))
    _against(report, f"{name}/p2p limit", seconds, ours, limits[0], target=LIMIT_TARGET if cut.target else None)
    _against(report, f"{name}/copy limit", seconds, ours, limits[1])
    _bytes(report, name, found, ours, [best, *(way for way in peers if way != best)])


def _compare_megatron(name: str, found: dict[str, Any], report: Report) -> None:
    seconds = {way: Runs(tuple(runs)) for way, runs in found["seconds"].items()}
    ours, theirs = seconds
    _against(report, name, seconds, ours, theirs, target=1.0)
    report.add(Row(name=f"{name}/{theirs}", value=_s(seconds[theirs]), unit="s", spread=seconds[theirs].spread))


def _against(
    report: Report, name: str, seconds: dict[str, Runs], ours: str, peer: str, *, target: float | None = None
) -> None:
    report.add(
        Row(
            name=name,
            value=_s(seconds[ours]),
            unit="s",
            target=target,
            peer=f"{peer}: {number(seconds[peer].median)} s",
            ratio=round(seconds[peer].median / seconds[ours].median, 3),
            spread=seconds[ours].spread,
        )
    )


def _bytes(report: Report, name: str, found: dict[str, Any], ours: str, peers: Sequence[str]) -> None:
    moved, bound = found["bytes"][ours], found["bound"]
    report.add(
        Row(
            name=f"{name}/bytes",
            value=round(moved / MIB, 2),
            unit="MiB",
            target=1.0,
            peer=f"lower bound: {bound / MIB:,.2f} MiB",
            ratio=bound / moved if moved else None,
        )
    )
    for way in peers:
        count = found["bytes"][way]
        report.add(Row(name=f"{name}/bytes/{way}", value=round(count / MIB, 2), unit="MiB"))


def _s(runs: Runs) -> float:
    return round(runs.median, 4)


def _measured(cut: Cut, options: Options, *, to_engines: bool, to_megatron: bool) -> dict[str, Any]:
    """What rank 0 found."""
    if not to_engines and not to_megatron:
        return {}
    world = cut.src.num_ranks
    answer, store = Path(options.folder / "reshard.json"), options.folder / "reshard_store"
    answer.unlink(missing_ok=True)
    store.unlink(missing_ok=True)
    job = reshard_ranks.Job(
        spec=model(quick=options.quick),
        src=cut.src,
        engine_tp=cut.engine_tp,
        engines=cut.engines,
        stride=cut.stride,
        to_engines=to_engines,
        to_megatron=to_megatron,
        runs=options.runs,
        threads=max(1, options.threads // world),
        profile=options.profile,
        store=str(store),
        answer=str(answer),
    )
    mp.spawn(reshard_ranks.main, (job,), nprocs=world)
    return json.loads(answer.read_text(encoding="utf-8"))
