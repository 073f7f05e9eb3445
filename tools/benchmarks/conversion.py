"""Conversions of a checkpoint through real files, against a plain copy of the same files; and the memory they take."""

import json
import os
import subprocess
from pathlib import Path

from tools.benchmarks.compare import Options
from tools.benchmarks.measure import Runs
from tools.benchmarks.report import Report, Row, number
from tools.benchmarks.side import REPO, SideError

MODEL = "llama3.2-1b"
QUICK_MODEL = "smollm2-135m"
CONVERSIONS = {
    "to_megatron": ("to-megatron", "--pp", "2"),
    "to_legacy": ("to-megatron", "--pp", "2", "--format", "legacy"),
    "to_hf": ("to-hf",),
}
"""Row -> arguments. Layouts that all models here admit."""

SPEED_TARGET = 0.5
"""Of the copy's rate."""
SPARE_BYTES = 2 * 2**30
"""Memory of a process beyond its own shard that a conversion may take."""


def run(options: Options, report: Report) -> None:
    """Rows `checkpoint/convert/*`: GB/s against a copy, peak memory against the limit. See README.md."""
    for name, argv in CONVERSIONS.items():
        if options.wants(f"checkpoint/convert/{name}"):
            _measure(name, argv, options, report)


def _measure(name: str, argv: tuple[str, ...], options: Options, report: Report) -> None:
    model = QUICK_MODEL if options.quick else MODEL
    found = [_rehearsed(model, argv, options) for _ in range(options.runs)]
    rates = Runs(tuple(one["converted"]["num_bytes"] / one["converted"]["seconds"] / 1e9 for one in found))
    copies = Runs(tuple(one["copied_bytes"] / one["copy_seconds"] / 1e9 for one in found))
    if not all(one["same"] for one in found):
        raise SideError(f"checkpoint/convert/{name}: the target is not the source; see rlhf-convert {argv[0]} --dummy")
    report.add(
        Row(
            name=f"checkpoint/convert/{name}",
            value=round(rates.median, 3),
            unit="GB/s",
            target=SPEED_TARGET,
            peer=f"plain copy: {number(copies.median)} GB/s",
            ratio=round(Runs(tuple(one["against_copy"] for one in found)).median, 3),
            spread=rates.spread,
        )
    )
    done = max((one["converted"] for one in found), key=lambda one: one["peak_bytes"])
    limit = done["num_bytes"] // done["num_files"] + SPARE_BYTES
    report.add(
        Row(
            name=f"checkpoint/convert/{name}/memory",
            value=round(done["peak_bytes"] / 2**30, 3),
            unit="GiB",
            target=1.0,
            peer=f"a file and 2 GiB: {limit / 2**30:.2f} GiB ({model}, {done['num_bytes'] / 1e9:.2f} GB)",
            ratio=round(limit / done["peak_bytes"], 3),
        )
    )


def _rehearsed(model: str, argv: tuple[str, ...], options: Options) -> dict:
    answer = options.folder / "conversion.json"
    command, *others = argv
    given = [command, model, str(options.folder / "converted"), *others, "--dummy", "--json", str(answer)]
    done = subprocess.run(
        [*options.run_prefix, options.python, str(Path("tools") / "convert_checkpoint.py"), *given],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SideError(f"rlhf-convert {' '.join(given)}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(answer.read_text(encoding="utf-8"))
