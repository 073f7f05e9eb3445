"""Entry: `python -m rlhf.train CONFIG.yaml [key=value ...]`, one process or under torchrun."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.build import build_loop
from rlhf.config.load import load_config
from rlhf.dist.exit_record import ExitCode
from rlhf.dist.job import job
from rlhf.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run what the arguments say; the exit code (DESIGN: 0 finished, 2 bad config). Every rank calls it."""
    try:
        config = load_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    with job(config.job, run_folder=Path(config.log.folder) / config.name) as ranks:
        build_loop(config, ranks).run()
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
