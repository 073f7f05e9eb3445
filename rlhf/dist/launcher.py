"""The launcher of one node, from its first mark to the job's exit code; scripts/launch.sh becomes it. Imports no torch.

    python -m rlhf.dist.launcher --run-folder F --world-size N [--nnodes M --node-rank R --rendezvous H:P] -- MODULE ...

Signals are held back and taken one at a time between two looks, so that nothing is interrupted half-way.
"""

import argparse
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlhf.dist.aftermath import ENDED_BY, finding_of, settled, sweep, verdict
from rlhf.dist.exit_record import ExitCode, ExitRecord, claim, clear_marks, exit_path, read_record, write_over
from rlhf.dist.gathering import Hub, Member
from rlhf.dist.heartbeat import Beat, read_beats
from rlhf.dist.launch_options import read_options, wants
from rlhf.dist.late_start import ALL_JOINED, late_start
from rlhf.dist.network import check_rendezvous, interface_of
from rlhf.dist.nodes import new_mark
from rlhf.dist.torchrun import Torchrun, command

LOOK_S = 0.3
FOLLOW_S = 5.0
"""When another node has ended the job, the ranks here get this long to find out and to say their part."""
FINISH_S = 60.0
"""After a good exit.json, torchrun gets this long to end."""
PATIENCE_S = 60.0
"""The nodes wait this long for one another at the end."""
LINGER_S = 15.0
"""Node 0, which cannot start, waits this long for the others so as to tell them."""
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
HEARD = ENDING | {signal.SIGUSR1, signal.SIGCHLD}


class NotStartedError(Exception):
    """The job cannot start; the record says why."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.record = ExitRecord(code=code, reason=reason)


class Launcher:
    """One node's launcher."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._run_folder, self._num_nodes = args, Path(args.run_folder), args.nnodes
        self._log = self._run_folder / "logs" / f"launcher_{args.node_rank}.log"
        self._endpoint = args.rendezvous if args.nnodes > 1 else "127.0.0.1:0"
        mark = new_mark(args.node_rank, host=socket.gethostname(), wants=wants(args))
        self._company: Hub | Member = (
            Member(self._run_folder, mark, num_nodes=args.nnodes)
            if args.node_rank
            else Hub(self._run_folder, mark, num_nodes=args.nnodes, label=args.job_id)
        )
        self._title = mark.title if args.nnodes > 1 else ""
        per_node = args.world_size // args.nnodes
        self._own_ranks = range(args.node_rank * per_node, (args.node_rank + 1) * per_node)
        self._signal, self._stop_asked, self._all_joined = "", False, False
        self._since: dict[str, float] = {}

    def run(self) -> int:
        """The job's exit code."""
        self._for_s("began")
        if self._args.node_rank == 0:
            clear_marks(self._run_folder)
        try:
            self._check_network()
            self._gather()
        except NotStartedError as failed:
            return self._not_started(failed.record)
        return self._finish(self._attend(self._start()))

    def _check_network(self) -> None:
        """On several nodes: node 0 can be found, and its port is free."""
        if self._num_nodes == 1:
            return
        try:
            self._company.set_address(check_rendezvous(self._endpoint, is_host=self._args.node_rank == 0))
        except (OSError, ValueError) as error:
            raise NotStartedError(
                ExitCode.BAD_INPUT,
                f"--rendezvous: {self._endpoint} is of no use on {self._title} ({error}); needs HOST:PORT, the name of "
                "node 0 as all nodes know it and a port that is free there; change it",
            ) from error

    def _gather(self) -> None:
        """Wait until the launchers of all nodes are there."""
        began = said = time.monotonic()
        while True:
            self._company.look()
            if self._company.trouble is not None:
                raise NotStartedError(ExitCode(self._company.trouble.code), self._company.trouble.reason)
            if self._company.mark.job_id:
                return
            waited = time.monotonic() - began
            if waited > self._args.start_timeout:
                raise NotStartedError(ExitCode.RANK_FAILED, self._who_is_missing())
            if time.monotonic() - said > 15:
                said = time.monotonic()
                _say(f"{self._title} waits for {self._company.missing()}, {waited:.0f} s so far")
            self._hear()
            if self._signal:
                raise NotStartedError(ExitCode.RANK_FAILED, f"{self._ended_by_signal()}, before the job had started")

    def _who_is_missing(self) -> str:
        return (
            f"no sign of {self._company.missing()} of {self._num_nodes} within {self._args.start_timeout:.0f} s: "
            f"no launcher of that rank marks {self._run_folder / 'nodes'}; needs this command on every node, and a run "
            "folder that all of them see; look at that node's console, or raise --start-timeout"
        )

    def _ended_by_signal(self) -> str:
        return f"{ENDED_BY}{self._signal} to the launcher" + (f" of {self._title}" if self._title else "")

    def _start(self) -> Torchrun:
        mark, address = self._company.mark, "127.0.0.1"
        variables = {
            "RLHF_JOB_ID": mark.job_id,
            "RLHF_NODE_RANK": str(mark.node_rank),
            "RLHF_LAUNCHER_PID": str(os.getpid()),
        }
        if self._num_nodes > 1:
            address = self._company.address()
            if not self._args.interface and (interface := interface_of(address)):
                variables["GLOO_SOCKET_IFNAME"] = interface
        if sys.stdout.isatty():  # rank 0 draws on this terminal, but its own descriptors lead into its log
            size = os.get_terminal_size(sys.stdout.fileno())
            variables |= {"LINES": str(size.lines), "COLUMNS": str(size.columns)}
            _say(f"starting {self._args.world_size} rank(s), which takes some seconds; run folder {self._run_folder}")
        arguments = command(
            python=sys.executable,
            program=self._args.program,
            num_nodes=self._num_nodes,
            ranks_per_node=len(self._own_ranks),
            job_id=mark.job_id,
            endpoint=self._endpoint,
            is_host=mark.node_rank == 0,
            address=address,
            timeout_s=self._args.start_timeout,
        )
        return Torchrun(arguments, variables=variables, log=self._log)

    def _attend(self, torchrun: Torchrun) -> int:
        """Wait for torchrun, which is ended when there is a reason to; its exit code."""
        began, over = time.monotonic(), False
        while (code := torchrun.code()) is None:
            self._hear()
            self._company.look()
            over = over or self._is_over(time.monotonic() - began)
            if over:
                torchrun.end()
        return code

    def _is_over(self, elapsed_s: float) -> bool:
        """Whether the ranks of this node have to end, though they do not yet."""
        if self._signal:
            return self._claim(ExitRecord(code=ExitCode.RANK_FAILED, reason=self._ended_by_signal()))
        record = read_record(exit_path(self._run_folder))
        if record is not None:
            good = record.code in (ExitCode.FINISHED, ExitCode.STOPPED)
            return self._for_s(f"exit.json says {record.code}") > (FINISH_S if good else FOLLOW_S)
        if self._company.trouble is not None:
            return self._for_s("trouble") > FOLLOW_S and self._claim(self._company.trouble)
        if elapsed_s < self._args.start_timeout or self._all_joined:
            return False
        late = late_start(
            self._own_beats(),
            self._own_ranks,
            node=self._title or "this host",
            over_s=elapsed_s - self._args.start_timeout,
            limit_s=self._args.start_timeout,
            launcher_log=self._log,
        )
        self._all_joined = late == ALL_JOINED
        return isinstance(late, ExitRecord) and self._claim(late)

    def _for_s(self, what: str) -> float:
        """Seconds since this was first so."""
        return time.monotonic() - self._since.setdefault(what, time.monotonic())

    def _claim(self, record: ExitRecord) -> bool:
        claim(self._run_folder, record)
        return True

    def _own_beats(self) -> list[Beat]:
        return read_beats(self._run_folder, self._own_ranks)

    def _hear(self) -> None:
        """Take a signal, or wait a moment for one."""
        if self._stop_asked and self._company.mark.job_id:  # earlier, node 0 would take the file for an old one
            self._stop_asked = False
            (self._run_folder / "stop").touch()
        heard = signal.sigtimedwait(HEARD, max(LOOK_S, 0.005 * self._num_nodes))
        if heard is None:
            return
        if heard.si_signo == signal.SIGUSR1:
            self._stop_asked = True
        elif heard.si_signo in ENDING:
            self._signal = self._signal or signal.Signals(heard.si_signo).name.removeprefix("SIG")

    def _not_started(self, record: ExitRecord) -> int:
        claim(self._run_folder, record)
        if isinstance(self._company, Member):
            self._company.end(record, patience_s=0)
        else:
            until = time.monotonic() + min(LINGER_S, self._args.start_timeout - self._for_s("began"))
            self._company.end(lambda _: record, patience_s=0)
            while self._company.missing() and time.monotonic() < until and not self._signal:
                self._hear()
                self._company.look()
        _say(f"the job did not start: {record.reason}")
        _say(f"exit code {record.code}, written to {exit_path(self._run_folder)}")
        return record.code

    def _finish(self, torchrun_code: int) -> int:
        """Sweep up, settle the record with the other nodes, say how it was."""
        beats = self._own_beats()
        finding = finding_of(
            beats, torchrun_code=torchrun_code, signal=self._signal, node=self._title, launcher_log=self._log
        )
        if torchrun_code and beats:  # before the sweep, whose consequences other nodes would take for the cause
            claim(self._run_folder, finding)
        for line in sweep(self._company.mark.job_id, self._args.node_rank, beats):
            _say(line)
        own = [finding] if torchrun_code else []
        if isinstance(self._company, Hub):
            record = self._company.end(lambda found: self._complete([*own, *found]), patience_s=PATIENCE_S)
        else:
            told = self._company.end(own[0] if own else None, patience_s=PATIENCE_S)
            record = self._go_by_exit_json(own) if told is None else told
        if sys.stdout.isatty() and self._signal:
            sys.stdout.write("\n")  # the cursor stands where the table was left
        brief = self._args.node_rank > 0  # node 0 tells the whole story
        sys.stdout.write(verdict(record, self._run_folder, self._log, brief=brief))
        return record.code

    def _complete(self, findings: Sequence[ExitRecord]) -> ExitRecord:
        record = settled(self._run_folder, findings)
        if record != read_record(exit_path(self._run_folder)):
            write_over(exit_path(self._run_folder), record)
        return record

    def _go_by_exit_json(self, own: Sequence[ExitRecord]) -> ExitRecord:
        """Without node 0's launcher: what is recorded, or is now by the first node to get here."""
        record = read_record(exit_path(self._run_folder)) or settled(self._run_folder, own)
        claim(self._run_folder, record)
        return read_record(exit_path(self._run_folder)) or record


def _say(text: str) -> None:
    sys.stdout.write(f"launch: {text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """The job's exit code; 2 when another launcher holds this place."""
    args = read_options(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # launch.sh ignored it until here
    logs = Path(args.run_folder) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f".launch_{args.node_rank}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(
                f"launch: {args.run_folder}: another job is at work in it; needs one at a time; set name=OTHER\n"
            )
            return ExitCode.BAD_INPUT
        return Launcher(args).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
