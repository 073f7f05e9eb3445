"""Entry: `python -m rlhf.train CONFIG.yaml [key=value ...]`, one process or under torchrun.

With `--check` nothing starts: rlhf/preflight/dry_run.py looks at the run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.load import load_config
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import ConfigError
from rlhf.preflight import dry_run

CHECK = "--check"


def main(argv: Sequence[str]) -> int:
    """Run what the arguments say; the exit code (DESIGN: 0 finished, 2 bad config). Every rank calls it."""
    if CHECK in argv:
        return dry_run.main([word for word in argv if word != CHECK])
    try:
        config = load_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    # Only here: the imports take seconds, for which neither --help nor a broken config should wait.
    from rlhf.build import build_loop  # noqa: PLC0415
    from rlhf.dist.job import job  # noqa: PLC0415

    with job(config.job, run_folder=Path(config.log.folder) / config.name) as ranks:
        build_loop(config, ranks).run()
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
