"""What a launcher is told on its command line, and what of it all nodes of a job must be told alike. Imports no torch."""

import argparse
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `python -m rlhf.dist.launcher`.

    Raises:
        SystemExit: Code 2 for words that are none, 0 after --help.
    """
    parser = argparse.ArgumentParser(prog="python -m rlhf.dist.launcher", description="Launch one node of a job.")
    parser.add_argument("--run-folder", required=True)
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job, the same number on each node")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="", help="HOST_0:PORT, for more than one node")
    parser.add_argument("--job-id", default="", help="begin of the job's id, for people")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds until every rank must be there")
    parser.add_argument("--interface", default="", help="GLOO_SOCKET_IFNAME, when the user has set it")
    parser.add_argument("program", nargs="+", help="-- MODULE [its arguments]")
    return parser.parse_args(argv)


def wants(options: argparse.Namespace) -> dict[str, str]:
    """What all nodes have to be started with alike, by the name under which a difference is told."""
    file = Path(options.program[1]) if len(options.program) > 1 else Path()
    return {
        "--nnodes": str(options.nnodes),
        "--nproc": str(options.world_size // options.nnodes),
        "--rendezvous": options.rendezvous,
        "--job-id": options.job_id,
        "program": shlex.join(options.program),
        str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else "",
    }
