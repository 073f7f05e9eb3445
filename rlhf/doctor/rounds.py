"""The doctor on every rank of a job: facts gathered, clocks compared, the shared folder tried, one report."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlhf.dist.agree import gather
from rlhf.doctor.examination import Examination, judge
from rlhf.doctor.finding import Finding, Level, error
from rlhf.doctor.odd_ones import odd_clocks, odd_ones, spans
from rlhf.doctor.report import report

CLOCK_ROUNDS = 5
SHARED_S = 60.0
"""Network file systems show a new file to other hosts up to a minute late."""


def make_rounds(examination: Examination, group: ProcessGroup, *, run_folder: Path) -> tuple[str, bool]:
    """The report about all ranks, and whether an error was found. Collective over `group` (gloo), the whole job."""
    everyone = gather(examination, group)
    host_of = {other.rank: other.host for other in everyone}
    about_all = [
        *odd_ones(everyone),
        *odd_clocks(clock_offsets_s(group), host_of),
        *unshared(run_folder, examination.rank, group, patience_s=SHARED_S if len(set(host_of.values())) > 1 else 2.0),
    ]
    findings = {other.rank: judge(other) for other in everyone}
    every = [*about_all, *(finding for own in findings.values() for finding in own)]
    return report(findings, about_all, host_of), any(finding.level == Level.ERROR for finding in every)


def clock_offsets_s(group: ProcessGroup) -> list[float]:
    """Each rank's clock against rank 0's, in seconds. Collective over `group`.

    Clocks are read as a barrier lets go; of some rounds the one in which all were read closest together counts.
    """
    rounds: list[list[float]] = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier(group)
        times = gather(time.time(), group)
        rounds.append([seen - times[0] for seen in times])
    return min(rounds, key=lambda offsets: max(map(abs, offsets)))


def unshared(run_folder: Path, rank: int, group: ProcessGroup, *, patience_s: float) -> list[Finding]:
    """Whether each rank can write into the run folder and sees what rank 0 wrote. Collective over `group`."""
    own, fault = run_folder / f"doctor_{rank}", ""
    nonce = gather(str(time.time_ns()), group)[0]
    try:
        own.write_text(nonce)
    except OSError as refused:
        fault = str(refused)
    dist.barrier(group)
    until = time.monotonic() + patience_s
    seen = _reads(run_folder / "doctor_0", nonce)
    while not seen and time.monotonic() < until:
        time.sleep(0.2)
        seen = _reads(run_folder / "doctor_0", nonce)
    states = gather((fault, seen), group)
    own.unlink(missing_ok=True)
    return _judged(run_folder, states)


def _reads(path: Path, nonce: str) -> bool:
    try:
        return path.read_text() == nonce
    except OSError:
        return False


def _judged(run_folder: Path, states: Sequence[tuple[str, bool]]) -> list[Finding]:
    found = []
    if refused := [rank for rank, (fault, _) in enumerate(states) if fault]:
        text = f"{run_folder} cannot be written by {spans(refused)}: {states[refused[0]][0]}"
        found.append(error("disk", text, "mend its rights, or choose another with log.folder=FOLDER"))
    elif blind := [rank for rank, (_, seen) in enumerate(states) if not seen]:
        text = f"{spans(blind)} cannot see what rank 0 wrote into {run_folder}: it is not one folder"
        found.append(error("disk", text, "choose a folder on a file system that all hosts share (log.folder=FOLDER)"))
    return found
