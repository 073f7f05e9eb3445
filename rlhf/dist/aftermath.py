"""What scripts/launch.sh does when torchrun has ended: sweep up what the job left, complete exit.json, say how it was.

    python -m rlhf.dist.aftermath --run-folder F --job-id ID --torchrun-code N --launcher-log L [--signal TERM]

Exit code: that of exit.json. Processes are told by the job's id in their environment, never by a name. No torch.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlhf.dist.exit_record import ExitCode, ExitRecord, exit_path, failure_path, read_record, write_over
from rlhf.dist.heartbeat import FINISHED, RUNNING, Beat, process_state, read_beats
from rlhf.dist.rank_logs import log_path

SHM = Path("/dev/shm")

ENDED_BY = "ended by SIG"
"""How the reason begins when somebody ended the job."""


def processes_of(job_id: str) -> list[psutil.Process]:
    """Processes of this host that carry RLHF_JOB_ID=job_id in the environment they were started with."""
    mark, found = f"RLHF_JOB_ID={job_id}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(int(folder.name)))
        except (OSError, psutil.NoSuchProcess):  # gone, or another user's
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def sweep(job_id: str, beats: Sequence[Beat], *, patience_s: float = 2.0) -> list[str]:
    """Kill the job's processes that are still there and free its shared memory; says what was found.

    Helpers that free shared memory leave by themselves once their users are gone: they get patience_s for it.
    """
    until = time.monotonic() + patience_s
    while (left := processes_of(job_id)) and time.monotonic() < until:
        time.sleep(0.1)
    said = [f"killed left-over process {process.pid}" for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    pids = {pid for beat in beats for pid in (beat.pid, *beat.children)} | {process.pid for process in left}
    owned = [f"rlhf_{job_id}_*", *(f"torch_{pid}_*" for pid in sorted(pids))]
    for path in [path for pattern in owned for path in SHM.glob(pattern)]:
        path.unlink(missing_ok=True)
        said.append(f"freed shared memory {path.name}")
    return said


def completed_record(
    run_folder: Path, beats: Sequence[Beat], *, torchrun_code: int, signal: str, launcher_log: Path
) -> ExitRecord:
    """The job's record: the one a rank wrote where it stands, else what can be told from what is left."""
    record = read_record(exit_path(run_folder))
    if record is not None and (torchrun_code == 0 or record.code not in (ExitCode.FINISHED, ExitCode.STOPPED)):
        return record
    code = ExitCode.RANK_FAILED
    if signal:
        return ExitRecord(code=code, reason=f"{ENDED_BY}{signal} to the launcher")
    running = [beat for beat in beats if beat.state == RUNNING]
    if running and all(process_state(beat) != "dead" for beat in running):
        return ExitRecord(code=code, reason=f"torchrun itself died with {torchrun_code} while its ranks were running")
    lost = next((beat for beat in running if process_state(beat) == "dead"), None)
    if lost is not None:
        reason = f"{lost.title} died without a traceback (killed, or a crash in C); it was {lost.doing}"
        return ExitRecord(code=code, reason=reason, rank=lost.rank, phase=lost.phase)
    if beats and all(beat.state == FINISHED for beat in beats):
        return ExitRecord(code=code, reason=f"every rank finished, but torchrun ended with {torchrun_code}")
    reason = f"torchrun ended with {torchrun_code} before a rank joined the job; see {launcher_log}"
    return ExitRecord(code=code, reason=reason)


def tail(path: Path, lines: int) -> str:
    """The last lines that this job wrote into a log, indented; empty when there is no log."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20000))
        text = file.read().decode(errors="replace")
    own = text[max(0, text.rfind("\n==== rank ")) :].lstrip("\n")  # earlier jobs in the folder wrote above
    own = re.split(r"^[WE]\d{4} .*torch/distributed/elastic", own, maxsplit=1, flags=re.MULTILINE)[0]  # torchrun's own
    return "".join(f"  | {line}\n" for line in own.splitlines()[-lines:])


def verdict(record: ExitRecord, run_folder: Path, launcher_log: Path) -> str:
    """What the console shows last."""
    if record.code == ExitCode.FINISHED:
        return ""
    if record.code == ExitCode.STOPPED:
        return f"launch: {record.reason}\n"
    blamed = log_path(run_folder, record.rank) if record.rank is not None else launcher_log
    also = [
        path.stem.removeprefix("failed_rank_")
        for path in sorted((run_folder / "logs").glob("failed_rank_*.json"))
        if record.rank is None or path != failure_path(run_folder, record.rank)
    ]
    who = "the job" if record.rank is None else f"rank {record.rank}"
    if record.code == ExitCode.BAD_INPUT and record.rank is not None:  # it has told the console what is wrong
        return f"launch: exit code {record.code}, written to {exit_path(run_folder)}; the rest is in {blamed}\n"
    if record.reason.startswith(ENDED_BY):
        text = f"launch: {record.reason}\n"
        return text + f"launch: exit code {record.code}, written to {exit_path(run_folder)}\n"
    text = f"launch: {who} failed: {record.reason}\n"
    text += f"launch: the end of {blamed}:\n{tail(blamed, 20)}"
    if also:
        text += f"launch: ended after it: ranks {', '.join(also)}; their logs are beside it\n"
    return text + f"launch: exit code {record.code}, written to {exit_path(run_folder)}\n"


def main(argv: Sequence[str]) -> int:
    """The exit code of the job."""
    parser = argparse.ArgumentParser(prog="python -m rlhf.dist.aftermath", description="Clean up after torchrun.")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--job-id", required=True, help="RLHF_JOB_ID of the job's processes")
    parser.add_argument("--torchrun-code", type=int, required=True)
    parser.add_argument("--launcher-log", type=Path, required=True, help="what torchrun wrote")
    parser.add_argument("--signal", default="", help="the signal that the launcher got, such as TERM")
    args = parser.parse_args(argv)
    beats = read_beats(args.run_folder)
    record = completed_record(
        args.run_folder,
        beats,
        torchrun_code=args.torchrun_code,
        signal=args.signal,
        launcher_log=args.launcher_log,
    )
    for line in sweep(args.job_id, beats):
        sys.stdout.write(f"launch: {line}\n")
    late = read_record(exit_path(args.run_folder))  # a rank that outlived torchrun may have told more
    if late is not None and record.rank is None and late.rank is not None:
        record = late
    write_over(exit_path(args.run_folder), record)
    sys.stdout.write(verdict(record, args.run_folder, args.launcher_log))
    return record.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
