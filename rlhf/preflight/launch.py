"""The launcher's question before anything starts; scripts/launch.sh asks it.

    python -m rlhf.preflight --nproc N --nnodes M --module rlhf.train CONFIG [key=value ...]

Prints `world_size` and `run_folder` on a line each and makes the folder. Exit 2 and a message that names every fault
for a run that cannot work. Reads config files and headers only and imports no torch, so that a mistake is shown within
a second or two.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.checks import collecting, refuse
from rlhf.config.load import read_config
from rlhf.config.run import RunConfig
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import CheckpointError, ConfigError, DataError, LayoutError
from rlhf.preflight.inputs import check_inputs
from rlhf.preflight.world import check_hosts, pools_are_known

OUR_PROGRAM = "rlhf.train"


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.preflight", description="Check a run before it starts.")
    parser.add_argument("--nproc", type=int, default=0, help="ranks on each host; 0: as many as the run needs")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts")
    parser.add_argument("--module", default=OUR_PROGRAM, help="program; of another one only the config is checked")
    parser.add_argument("config", nargs=argparse.REMAINDER, help="CONFIG [key=value ...]")
    args = parser.parse_args(argv)
    try:
        world, run_folder = _checked(args)
    except (ConfigError, CheckpointError, LayoutError, DataError) as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    sys.stdout.write(f"{world}\n{run_folder}\n")
    return 0


def _checked(args: argparse.Namespace) -> tuple[int, Path]:
    """(world size, run folder) of a run without a fault; else every fault is raised together."""
    config, faults = read_config(args.config)
    world = 0
    with collecting(faults):
        if pools_are_known(faults):
            world = args.nproc * args.nnodes or max(ranks.stop for ranks in config.pools().values())
            check_hosts(config, world, nnodes=args.nnodes)
        if args.module == OUR_PROGRAM:
            check_inputs(config, faults)
        run_folder = _make_folder(config, may_make=not faults.found)
    faults.raise_any(args.config[0])
    return world, run_folder


def _make_folder(config: RunConfig, *, may_make: bool) -> Path:
    run_folder = (Path(config.log.folder) / config.name).absolute()
    try:
        if may_make:
            (run_folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"log.folder: {run_folder} cannot be made ({error}); needs a place to write; set log.folder=FOLDER")
    return run_folder
