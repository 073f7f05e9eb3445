"""Studies a weight sync from a training layout into engines, for a job of any size, without starting one.

    python tools/plan_reshard.py --model llama3-70b --src tp8,pp4,dp8 --dst tp8
    python tools/plan_reshard.py --model llama3-8b --src tp2,pp3,layers10/11/11 --dst tp4,dp2,first_rank8 --out plan.png
    python tools/plan_reshard.py configs/llama3_70b/ppo.yaml actor.parallel.dp=8 rollout.dp=32 --json plan.json

Prints the certificate (bytes moved against the lower bound), bytes by link, the slowest rank and its seconds at given
bandwidths, and what others would need for the same: full all-gather, HybridFlow's groups, DeepSpeed-Chat. Draws who
sends to whom. A model is a name (--model help lists them), a hub id that is known here, or a folder with config.json.
Exit code 2 for layouts that cannot be.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # imports begin at the root, though this file is run as a script

from rlhf.errors import ConfigError, RlhfError  # noqa: E402
from rlhf.preflight.link_time import Bandwidths  # noqa: E402
from rlhf.preflight.traffic_picture import draw_traffic  # noqa: E402
from rlhf.preflight.transition import ENGINES, Transition, study  # noqa: E402
from rlhf.preflight.transition_of import Given, model_names, transition_of  # noqa: E402
from rlhf.preflight.transition_report import as_json, render  # noqa: E402
from rlhf.reshard.layout import ITEM_BYTES  # noqa: E402
from rlhf.reshard.topology import Fanout  # noqa: E402

BAD_INPUT = 2


def main(argv: Sequence[str]) -> int:
    """0, or 2 when the layouts cannot be or a file cannot be written."""
    args = _parser().parse_intermixed_args(argv)
    if args.model == "help":
        sys.stdout.write("\n".join(model_names()) + "\n")
        return 0
    bandwidths = Bandwidths(intra_node_gbps=args.intra_node_gbps, inter_node_gbps=args.inter_node_gbps)
    try:
        found = study(_transition(args))
    except RlhfError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    sys.stdout.write(f"{render(found, bandwidths)}\n")
    try:
        if args.out is not None:
            draw_traffic(found, bandwidths, args.out)
            sys.stdout.write(f"picture: {args.out}\n")
        if args.json is not None:
            args.json.write_text(json.dumps(as_json(found, bandwidths), indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"figures: {args.json}\n")
    except OSError as error:
        sys.stderr.write(f"--out, --json: cannot be written ({error}); needs a place to write; give another\n")
        return BAD_INPUT
    return 0


def _transition(args: argparse.Namespace) -> Transition:
    if bool(args.config) == bool(args.model):
        raise ConfigError("command line: needs either CONFIG.yaml [KEY=VALUE ...] or --model; give one; see --help")
    return transition_of(
        Given(
            config=tuple(args.config),
            model=args.model,
            src=args.src,
            dst=args.dst,
            engine=args.engine,
            dtype=args.dtype,
            fanout=args.fanout,
            gpus_per_node=args.gpus_per_node,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/plan_reshard.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG", help="a run's CONFIG.yaml [KEY=VALUE ...]")
    parser.add_argument("--model", default="", help="such as llama3-70b; `--model help` lists the names")
    parser.add_argument(
        "--src",
        default="",
        metavar="SIZES",
        help="training layout: tp8,pp4,dp8; also ep, etp, vpp, first_rank, layers20/19/... of pp",
    )
    parser.add_argument(
        "--dst",
        default="",
        metavar="SIZES",
        help="engines: tp8; also ep, dp (how many; as many as fit), first_rank, stride",
    )
    parser.add_argument("--engine", default="", choices=("", *ENGINES), help=f"whose layout --dst is ({ENGINES[0]})")
    parser.add_argument("--dtype", default="", choices=("", *ITEM_BYTES), help="of the weights (bfloat16)")
    parser.add_argument(
        "--fanout", default="", choices=("", *Fanout), help="node: each block crosses into a node once (direct)"
    )
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="ranks on a node (8)")
    defaults = Bandwidths()
    for where, default, why in (
        ("intra", defaults.intra_node_gbps, "inside a node: NVLink of an H100"),
        ("inter", defaults.inter_node_gbps, "across nodes: one port of 400 Gb/s for each rank"),
    ):
        parser.add_argument(
            f"--{where}-node-gbps",
            type=_rate,
            default=default,
            metavar="GBPS",
            help=f"gigabits a second of one rank, each way, {why} ({default:g})",
        )
    parser.add_argument("--out", type=Path, metavar="PNG", help="draw a picture there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, rank by rank")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given; needs a whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} given; needs gigabits a second above 0, such as 400")
    return float(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
