"""Entry: `python -m rlhf.train CONFIG.yaml [key=value ...]`, one process or under torchrun.

With `--check` nothing starts: rlhf/preflight/dry_run.py looks at the run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.checks import collecting
from rlhf.config.load import read_config
from rlhf.config.run import RunConfig
from rlhf.dist.exit_record import ExitCode
from rlhf.errors import ConfigError
from rlhf.preflight import dry_run
from rlhf.preflight.inputs import check_inputs

CHECK = "--check"


def main(argv: Sequence[str]) -> int:
    """Run what the arguments say; the exit code (DESIGN: 0 finished, 2 bad config). Every rank calls it."""
    if CHECK in argv:
        return dry_run.main([word for word in argv if word != CHECK])
    try:
        config = _sound_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.BAD_INPUT)
    # Only here: the imports take seconds, for which neither --help nor a broken config should wait.
    from rlhf.build.loops import build_loop  # noqa: PLC0415
    from rlhf.dist.job import job  # noqa: PLC0415

    with job(config.job, run_folder=Path(config.log.folder) / config.name) as ranks:
        build_loop(config, ranks).run()
    return int(ExitCode.FINISHED)


def _sound_config(argv: Sequence[str]) -> RunConfig:
    """The settings; of faulty ones also what is wrong with the files that they name, all in one message."""
    config, faults = read_config(argv)
    if faults.found:
        with collecting(faults):
            check_inputs(config, faults)
        faults.raise_any(argv[0])
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
