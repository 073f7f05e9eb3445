"""Resharding: our weight sync against gathering whole shards and slicing, over the same gloo groups in the same run."""

import json
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


@dataclass(frozen=True, slots=True)
class Cut:
    """From a training layout to engines on the same ranks."""

    src: ParallelConfig
    engine_tp: int
    target: float | None = None

    @property
    def engines(self) -> int:
        """As many as fill the ranks."""
        return self.src.num_ranks // self.engine_tp


CUTS = {
    "tp4-tp2": Cut(ParallelConfig(tp=4), 2, target=2.0),
    "tp4-tp1": Cut(ParallelConfig(tp=4), 1),
    "tp2pp2-tp2": Cut(ParallelConfig(tp=2, pp=2), 2),
    "tp2dp2-tp4": Cut(ParallelConfig(tp=2, dp=2), 4),
}
"""Training layout and the tensor-parallel size of the engines; names of rows."""


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
    """Rows `reshard/CUT` in seconds: the transfer; `/sampled`, `/verified` with checksums compared; `/bytes` moved."""
    for name, cut in CUTS.items():
        if options.wants(f"reshard/{name}") and (cut.target or not options.quick):
            _compare(f"reshard/{name}", cut, options, report)


def _compare(name: str, cut: Cut, options: Options, report: Report) -> None:
    found = _measured(cut, options)
    seconds = {way: Runs(tuple(runs)) for way, runs in found["seconds"].items()}
    peers = [way for way in seconds if way not in (reshard_ranks.OURS, reshard_ranks.SAMPLED, reshard_ranks.VERIFIED)]
    best = min(peers, key=lambda way: seconds[way].median)
    limit = seconds[best].median
    for way, row_name, target in (
        (reshard_ranks.OURS, name, cut.target),
        (reshard_ranks.SAMPLED, f"{name}/sampled", None),
        (reshard_ranks.VERIFIED, f"{name}/verified", None),
    ):
        report.add(
            Row(
                name=row_name,
                value=round(seconds[way].median, 4),
                unit="s",
                target=target,
                peer=f"{best}: {number(limit)} s",
                ratio=round(limit / seconds[way].median, 3),
                spread=seconds[way].spread,
            )
        )
    for way in peers:
        value = round(seconds[way].median, 4)
        report.add(Row(name=f"{name}/{way}", value=value, unit="s", spread=seconds[way].spread))
    moved, theirs = found["bytes"][reshard_ranks.OURS], found["bytes"][best]
    report.add(
        Row(
            name=f"{name}/bytes",
            value=round(moved / MIB, 2),
            unit="MiB",
            peer=f"{best}: {theirs / MIB:,.0f} MiB; lower bound {found['bound'] / MIB:,.0f} MiB",
            ratio=round(theirs / moved, 3) if moved else None,
        )
    )
    if options.profile:
        report.note(found["profile"])


def _measured(cut: Cut, options: Options) -> dict[str, Any]:
    """What rank 0 found."""
    world = cut.src.num_ranks
    answer, store = Path(options.folder / "reshard.json"), options.folder / "reshard_store"
    answer.unlink(missing_ok=True)
    store.unlink(missing_ok=True)
    job = reshard_ranks.Job(
        spec=model(quick=options.quick),
        src=cut.src,
        engine_tp=cut.engine_tp,
        engines=cut.engines,
        runs=options.runs,
        threads=max(1, options.threads // world),
        profile=options.profile,
        store=str(store),
        answer=str(answer),
    )
    mp.spawn(reshard_ranks.main, (job,), nprocs=world)
    return json.loads(answer.read_text(encoding="utf-8"))
