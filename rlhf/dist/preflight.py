"""What scripts/launch.sh asks before it starts anything: is the configuration good, where is its run folder?

    python -m rlhf.dist.preflight --nproc N --nnodes M CONFIG [key=value ...]

Prints `world_size` and `run_folder` on a line each and makes the folder. Exit 2 and a message for a bad configuration.
Imports no torch, so that a mistake is shown within a second or two.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.load import load_config
from rlhf.config.run import RunConfig, check_world
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import ConfigError


def world_size(config: RunConfig, *, nproc: int, nnodes: int) -> int:
    """Ranks of the job: nproc on each of nnodes hosts, or as many as the pools of the run need when nproc is 0.

    Raises:
        ConfigError: The pools do not fit that many ranks, or they do not divide over the hosts.
    """
    wanted = max(ranks.stop for ranks in config.pools().values())
    world = nproc * nnodes or wanted
    check_world(config, world)
    if world % nnodes:
        raise ConfigError(f"--nnodes: {world} ranks on {nnodes} hosts; needs the same number on each; change one")
    return world


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.dist.preflight", description="Check a run before it starts.")
    parser.add_argument("--nproc", type=int, default=0, help="ranks on each host; 0: as many as the run needs")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts")
    parser.add_argument("config", nargs=argparse.REMAINDER, help="CONFIG [key=value ...]")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config)
        world = world_size(config, nproc=args.nproc, nnodes=args.nnodes)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    run_folder = (Path(config.log.folder) / config.name).absolute()
    (run_folder / "logs").mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{world}\n{run_folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
