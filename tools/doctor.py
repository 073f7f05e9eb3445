"""What may be wrong with the machines, before a job finds out.

    python tools/doctor.py                                          this machine
    scripts/launch.sh --doctor --nproc 8                            every rank of a job on this host
    srun --ntasks-per-node=1 scripts/launch.sh --doctor --nproc 8 --nnodes 4 --rendezvous "$HEAD:29500"

Versions that belong together, devices, the network interfaces that gloo and NCCL would use, shared memory, disk,
limits, clocks; under launch.sh also which rank or host differs from the others. Exit 0, or 2 when an error was found.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from rlhf.config.job import JobConfig  # noqa: E402
from rlhf.doctor.examination import Examination, examine, judge  # noqa: E402
from rlhf.doctor.finding import Level  # noqa: E402
from rlhf.doctor.report import report  # noqa: E402


def look(
    folders: Sequence[Path], *, rank: int = 0, local_rank: int = 0, ranks_here: int = 1, world: int = 1
) -> Examination:
    """This rank and, on the first of a host, the host."""
    return examine(
        dict(os.environ),
        constraints=REPO / "constraints.txt",
        folders=folders,
        rank=rank,
        local_rank=local_rank,
        ranks_here=ranks_here,
        num_hosts=world // ranks_here,
    )


def alone(folders: Sequence[Path]) -> int:
    """This machine; works without torch too."""
    examination = look(folders)
    findings = judge(examination)
    print(report({0: findings}, [], {0: examination.host}), end="")
    return 2 if any(finding.level == Level.ERROR for finding in findings) else 0


def in_job(folders: Sequence[Path], run_folder: Path) -> int:
    """Every rank of a job."""
    from rlhf.dist.job import job  # noqa: PLC0415  # needs torch, which the doctor may find missing
    from rlhf.doctor.rounds import make_rounds  # noqa: PLC0415
    from rlhf.errors import ConfigError  # noqa: PLC0415

    with job(JobConfig(device="cpu", collective_timeout_s=600.0), run_folder=run_folder) as ranks:
        examination = look(
            folders,
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            ranks_here=ranks.local_world_size,
            world=ranks.world_size,
        )
        everyone = ranks.groups.cpu_group([tuple(range(ranks.world_size))])
        text, has_error = make_rounds(examination, everyone, run_folder=run_folder)
        if ranks.rank == 0:
            print(text, end="", flush=True)
            if has_error:
                raise ConfigError("doctor: an error was found; see above")
    return 0


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        prog="doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run-folder", type=Path, default=Path("runs/doctor"), help="where runs are written (%(default)s)"
    )
    args = parser.parse_args(argv)
    folders = [args.run_folder.parent, Path(".cache"), Path("/tmp")]
    return in_job(folders, args.run_folder.absolute()) if "RANK" in os.environ else alone(folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
