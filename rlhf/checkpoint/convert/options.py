"""Options that the commands of `rlhf-convert` share. Imports no torch."""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

DIFFERENT = 1
"""Exit code of a comparison that found a difference."""

DTYPES = ("float32", "bfloat16", "float16")

LAYOUT = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "vpp": "model chunks a stage",
    "ep": "expert-parallel ranks",
    "etp": "ranks that share an expert",
}
"""Axes of a target layout, and what each counts."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Given:
    """A checkpoint as named on the command line."""

    path: Path
    role: str = ""
    """Of a training checkpoint, which model of it; empty: there is one."""
    config_from: Path | None = None
    """Hugging Face folder of the model, for checkpoints that do not say what their model is."""


def add_source(parser: argparse.ArgumentParser, name: str) -> None:
    """The checkpoint that is read, and what may have to be said about it."""
    parser.add_argument("source", type=Path, metavar=name, help="the checkpoint's folder")
    add_about(parser)


def add_about(parser: argparse.ArgumentParser) -> None:
    """What may have to be said about a checkpoint."""
    parser.add_argument("--role", default="", help="model of a training checkpoint: actor or critic (the only one)")
    parser.add_argument(
        "--config-from",
        type=Path,
        metavar="HF",
        help="folder with config.json and tokenizer of the model, where the checkpoint has none (Megatron-LM's)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Where to write, and in which dtype."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", default="", choices=DTYPES, help="cast to it (the bits as they are)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Whether files are summed."""
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read every file that a manifest.json has a checksum of, and compare (yes)",
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The layout that the files are cut for; any other can load them too."""
    for name, what in LAYOUT.items():
        parser.add_argument(f"--{name}", type=_count, default=1, metavar="N", help=f"{what} (1)")
    parser.add_argument(
        "--layers-per-stage",
        type=_counts,
        default=(),
        metavar="N,N,...",
        help="layers of each pipeline stage, or of each of the pp*vpp chunks (evenly)",
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    """Which of Megatron-LM's formats is written."""
    parser.add_argument(
        "--format",
        default="torch_dist",
        choices=("torch_dist", "legacy"),
        help="torch_dist loads into any layout; legacy is mp_rank folders, for this layout alone (torch_dist)",
    )
    parser.add_argument(
        "--names",
        choices=("te", "local"),
        help="of legacy: names of Transformer Engine's layers, Megatron-LM's default, or of its local ones (te)",
    )


def add_trials(parser: argparse.ArgumentParser) -> None:
    """Conversions without a checkpoint."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--dry-run",
        action="store_true",
        help="say files, sizes and memory and write nothing; SOURCE may be a published model's name, llama3-70b",
    )
    which.add_argument(
        "--dummy",
        action="store_true",
        help="make weights up, convert them through real files, measure beside a plain copy, and remove all of it",
    )
    parser.add_argument("--processes", type=_count, metavar="N", help="of --dry-run: that will convert together (1)")


def check(args: argparse.Namespace) -> None:
    """Refuse options that would do nothing.

    Raises:
        ConfigError: One was given.
    """
    said = vars(args)
    trial = next((name for name in ("dry_run", "dummy") if said.get(name)), "")
    needless = {
        "--names": "means something for --format legacy only" if said.get("format") == "torch_dist" else "",
        "--processes": "means something with --dry-run only" if trial != "dry_run" else "",
        "--role": f"means nothing with --{trial.replace('_', '-')}, whose model SOURCE names" if trial else "",
    }
    needless["--config-from"] = needless["--role"]
    for option, why in needless.items():
        if why and (value := said.get(option[2:].replace("-", "_"))):
            raise ConfigError(f"{option} {value}: {why}; leave it out")


def check_report(file: Path | None) -> None:
    """Whether a report can be written, seen before the work that it is of. One process calls it.

    Raises:
        ConfigError: It cannot.
    """
    if file is None:
        return
    is_new = not file.exists()
    try:
        with file.open("a", encoding="utf-8"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            f"--json {file}: {error.strerror}; needs a file that can be written in a folder that is there; correct it"
        ) from error


def layout(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the layout, by name."""
    return {**{name: getattr(args, name) for name in LAYOUT}, "layers_per_stage": args.layers_per_stage}


def add_json(parser: argparse.ArgumentParser) -> None:
    """A report for programs."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")


def given(args: argparse.Namespace, name: str = "source") -> Given:
    """The checkpoint that is read, by the name of its argument."""
    return Given(getattr(args, name), args.role, args.config_from)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given; needs a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def num_bytes(text: str) -> int:
    """A size such as 5GB (decimal), 2GiB or 4096.

    Raises:
        argparse.ArgumentTypeError: It is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if (
        not found
        or found[2].upper() not in _UNITS
        or not 1 <= float(found[1]) * _UNITS[found[2].upper()] < float("inf")
    ):
        raise argparse.ArgumentTypeError(f"{text!r} given; needs a size such as 5GB, 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def show(text: str, record: Mapping[str, object], file: Path | None) -> None:
    """Print a result, and write it as JSON where asked.

    Raises:
        OSError: The file cannot be written.
    """
    sys.stdout.write(f"{text}\n")
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"report: {file}\n")
    sys.stdout.flush()
