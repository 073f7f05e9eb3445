"""What a launcher does when its torchrun has ended: sweep up what the node left, find out how it was, say it.

Processes are told by the job's id and the node's rank in their environment, never by a name. No torch.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rlhf.dist.exit_record import ExitCode, ExitRecord, exit_path, failure_path, read_record
from rlhf.dist.heartbeat import FINISHED, RUNNING, Beat, process_state
from rlhf.dist.rank_logs import log_path

SHM = Path("/dev/shm")

ENDED_BY = "ended by SIG"
"""How the reason begins when somebody ended the job."""


def processes_of(job_id: str, node_rank: int) -> list[psutil.Process]:
    """Processes of this machine that were started with RLHF_JOB_ID and RLHF_NODE_RANK of this node of the job."""
    marks, found = {f"RLHF_JOB_ID={job_id}".encode(), f"RLHF_NODE_RANK={node_rank}".encode()}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(psutil.Process(int(folder.name)))
        except (OSError, psutil.NoSuchProcess):  # gone, or another user's
            continue
    return [process for process in found if is_there(process)]


def is_there(process: psutil.Process) -> bool:
    """Neither gone nor a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sweep(job_id: str, node_rank: int, beats: Sequence[Beat], *, patience_s: float = 2.0) -> list[str]:
    """Kill the node's processes that are still there and free its shared memory; says what was found.

    Helpers that free shared memory leave by themselves once their users are gone: they get patience_s for it.
    """
    until = time.monotonic() + patience_s
    while (left := processes_of(job_id, node_rank)) and time.monotonic() < until:
        time.sleep(0.1)
    said = [f"killed left-over process {process.pid}" for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    pids = {pid for beat in beats for pid in (beat.pid, *beat.children)} | {process.pid for process in left}
    for path in [path for pid in sorted(pids) for kind in ("torch", "rlhf") for path in SHM.glob(f"{kind}_{pid}_*")]:
        path.unlink(missing_ok=True)
        said.append(f"freed shared memory {path.name}")
    for path in [path for pid in sorted(pids) for path in Path(tempfile.gettempdir()).glob(f"rlhf_{pid}_*")]:
        shutil.rmtree(path, ignore_errors=True)
        said.append(f"removed {path}")
    return said


def finding_of(beats: Sequence[Beat], *, torchrun_code: int, signal: str, node: str, launcher_log: Path) -> ExitRecord:
    """How a node ended whose torchrun did not come through, from what is left of it.

    Args:
        beats: Last beats of the node's ranks.
        torchrun_code: Exit code of its torchrun.
        signal: What its launcher was told to end by, such as TERM; else empty.
        node: Its name, such as `node 1 (host b)`; empty for a job of one node.
        launcher_log: What its torchrun said.
    """
    code, on = ExitCode.RANK_FAILED, f" of {node}" if node else ""
    if signal:
        return ExitRecord(code=code, reason=f"{ENDED_BY}{signal} to the launcher{on}")
    running = [beat for beat in beats if beat.state == RUNNING]
    if running and all(process_state(beat) != "dead" for beat in running):
        return ExitRecord(
            code=code, reason=f"torchrun itself{on} died with {torchrun_code} while its ranks were running"
        )
    lost = next((beat for beat in running if process_state(beat) == "dead"), None)
    if lost is not None:
        reason = f"{lost.title} died without a traceback (killed, or a crash in C); it was {lost.doing}"
        return ExitRecord(code=code, reason=reason, rank=lost.rank, phase=lost.phase)
    if beats and all(beat.state == FINISHED for beat in beats):
        return ExitRecord(code=code, reason=f"every rank{on} finished, but torchrun ended with {torchrun_code}")
    reason = f"torchrun{on} ended with {torchrun_code} before a rank joined the job; see {launcher_log}"
    return ExitRecord(code=code, reason=reason)


def settled(run_folder: Path, findings: Sequence[ExitRecord]) -> ExitRecord:
    """The job's record: the one that was written first where it stands, else the most telling of the nodes' findings.

    Args:
        run_folder: Where exit.json lies.
        findings: Of the nodes that did not end well.
    """
    record = read_record(exit_path(run_folder))
    if record is not None and (not findings or record.code not in (ExitCode.FINISHED, ExitCode.STOPPED)):
        return record
    if not findings:
        return ExitRecord(code=ExitCode.RANK_FAILED, reason="torchrun ended with 0, but no rank had joined the job")
    return max(findings, key=lambda finding: (finding.reason.startswith(ENDED_BY), finding.rank is not None))


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


def verdict(record: ExitRecord, run_folder: Path, launcher_log: Path, *, brief: bool = False) -> str:
    """What the console shows last; `brief` leaves out the end of the blamed log."""
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
    if brief:
        return text + f"launch: exit code {record.code}, written to {exit_path(run_folder)}\n"
    text += f"launch: the end of {blamed}:\n{tail(blamed, 20)}"
    if also:
        text += f"launch: ended after it: ranks {', '.join(also)}; their logs are beside it\n"
    return text + f"launch: exit code {record.code}, written to {exit_path(run_folder)}\n"
