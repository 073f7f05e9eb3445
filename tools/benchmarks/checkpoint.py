"""Checkpoints: saving and loading against raw writes and reads of the same bytes; how long a background save stalls."""

import json
from collections.abc import Mapping

import torch.multiprocessing as mp

from tools.benchmarks import checkpoint_ranks, conversion, megatron_save
from tools.benchmarks.checkpoint_ranks import CHECKED, DIRECT, DIRECT_READ, LOAD, RAW_READ, RAW_WRITE, READ, SAVE, STALL
from tools.benchmarks.compare import Options
from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row, number

RANKS = 2
RAW_TARGET = 1 / 1.5
"""Of the raw rate."""
STALL_TARGET = 10.0
"""Synchronous saves as long as a stall."""


def run(options: Options, report: Report) -> None:
    """Rows `checkpoint/*` in seconds, with rates in remarks, and of conversions. See README.md."""
    _save_and_load(options, report)
    _of_a_model(options, report)
    conversion.run(options, report)


def _save_and_load(options: Options, report: Report) -> None:
    if not options.wants("checkpoint/save") and not options.wants("checkpoint/load"):
        return
    answer, store = options.folder / "checkpoint.json", options.folder / "checkpoint_store"
    job = checkpoint_ranks.Job(
        num_parameters=1_000_000 if options.quick else 100_000_000,
        num_layers=8,
        runs=options.runs,
        threads=max(1, options.threads // RANKS),
        store=str(store),
        answer=str(answer),
        folder=str(options.folder),
    )
    mp.spawn(checkpoint_ranks.main, (job, RANKS), nprocs=RANKS)
    found = json.loads(answer.read_text(encoding="utf-8"))
    seconds = {way: Runs(tuple(runs)) for way, runs in found["seconds"].items()}
    report.note(
        f"checkpoint of {found['bytes'] / 1e9:.2f} GB by {RANKS} ranks on {found['disk']}; "
        + ", ".join(f"{way} {found['bytes'] / runs.median / 1e9:.2f} GB/s" for way, runs in seconds.items())
    )
    _against(report, "checkpoint/save", seconds, SAVE, RAW_WRITE, target=RAW_TARGET)
    _against(report, "checkpoint/save/direct", seconds, SAVE, DIRECT)
    _against(report, "checkpoint/load", seconds, LOAD, RAW_READ, target=RAW_TARGET)
    _against(report, "checkpoint/load/direct", seconds, LOAD, DIRECT_READ)
    for part in (CHECKED, READ):
        report.add(Row(name=f"checkpoint/load/{part}", value=_s(seconds[part]), unit="s", spread=seconds[part].spread))
    _against(report, "checkpoint/stall", seconds, STALL, SAVE, target=STALL_TARGET)


def _of_a_model(options: Options, report: Report) -> None:
    if not options.wants("checkpoint/model"):
        return
    answer, folder = options.folder / "model.json", options.folder / "checkpoint_model"
    folder.mkdir()
    job = megatron_save.Job(
        spec=megatron_save.spec_of(quick=options.quick),
        rows=4,
        runs=options.runs,
        threads=max(1, options.threads // RANKS),
        store=str(options.folder / "model_store"),
        answer=str(answer),
        folder=str(folder),
    )
    mp.spawn(megatron_save.main, (job, RANKS), nprocs=RANKS)
    found = json.loads(answer.read_text(encoding="utf-8"))
    seconds = {way: Runs(tuple(runs)) for way, runs in found["seconds"].items()}
    sizes, gather = found["bytes"], seconds[megatron_save.GATHER]
    report.note(
        f"a model and its optimizer, dp {RANKS}: {sizes['ours'] / 1e9:.2f} GB by us, {sizes['theirs'] / 1e9:.2f} GB by "
        f"dist_checkpointing, {gather.median:.2f} s of whose save are gathering; a step trains "
        f"{RANKS * job.rows * megatron_save.ROW_TOKENS:,} tokens"
    )
    _against(report, "checkpoint/model/save", seconds, megatron_save.OURS, megatron_save.THEIRS, target=1.0)
    _against(report, "checkpoint/model/load", seconds, megatron_save.LOAD, megatron_save.LOAD_THEIRS)
    _against(report, "checkpoint/model/stall", seconds, megatron_save.STALL, megatron_save.STEP)
    _against(report, "checkpoint/model/step", seconds, megatron_save.BESIDE, megatron_save.STEP)


def _against(
    report: Report, name: str, seconds: Mapping[str, Runs], ours: str, other: str, *, target: float | None = None
) -> None:
    report.add(
        Row(
            name=name,
            value=_s(seconds[ours]),
            unit="s",
            target=round(target, 3) if target else None,
            peer=f"{other}: {number(seconds[other].median)} s",
            ratio=round(seconds[other].median / seconds[ours].median, 3),
            spread=seconds[ours].spread,
        )
    )


def _s(runs: Runs) -> float:
    return round(runs.median, 4)
