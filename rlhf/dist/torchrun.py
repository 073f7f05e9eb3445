"""torchrun as a child of the launcher: its command line, and a death that takes it along. Imports no torch."""

import ctypes
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TERM_S = 30.0
"""torchrun, told to end, gives its workers 10 s; after this long it is killed."""

_PR_SET_PDEATHSIG = 1


def command(
    *,
    python: str,
    program: Sequence[str],
    num_nodes: int,
    ranks_per_node: int,
    job_id: str,
    endpoint: str,
    is_host: bool,
    address: str,
    timeout_s: float,
) -> list[str]:
    """The command line. Nodes meet by c10d rendezvous, in a store that node 0's torchrun holds.

    Args:
        python: Interpreter.
        program: Module that the ranks run, and its arguments.
        num_nodes: Nodes of the job; each has one torchrun.
        ranks_per_node: Ranks on each.
        job_id: The same on all nodes, and new for each job.
        endpoint: HOST:PORT of the store.
        is_host: This node holds the store.
        address: Where other nodes reach this one.
        timeout_s: All nodes must have come by then.
    """
    limits = {"is_host": str(is_host).lower(), "join_timeout": max(1, int(timeout_s)), "last_call_timeout": 1}
    limits |= {"close_timeout": 5, "read_timeout": max(5, min(60, int(timeout_s / 2)))}
    return [
        *(python, "-m", "torch.distributed.run"),
        *("--nnodes", str(num_nodes), "--nproc-per-node", str(ranks_per_node), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job_id),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in limits.items())),
        *("--local-addr", address, "--shutdown-timeout", "10", "--module", *program),
    ]


def _in_the_child() -> None:
    """Dies with its parent, and hears the signals that the parent holds back."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class Torchrun:
    """The process. It has a session of its own, so that a Ctrl-C reaches the launcher alone."""

    def __init__(self, arguments: Sequence[str], *, variables: Mapping[str, str], log: Path) -> None:
        """Start it; what it says on stderr goes to `log`, its own noise."""
        settings = [f"{name}={value}" for name, value in variables.items()]
        with log.open("w") as noise:
            self._process = subprocess.Popen(
                ["env", *settings, *arguments],
                stderr=noise,
                start_new_session=True,
                preexec_fn=_in_the_child,  # this process has one thread
            )
        self._told_at: float | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def code(self) -> int | None:
        """Its exit code, 128 + N when signal N killed it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """Tell it to end, and kill it when it has been told long ago. Returns at once; call it again and again."""
        if self._told_at is None:
            self._told_at = time.monotonic()
            self._process.terminate()
        elif time.monotonic() - self._told_at > TERM_S:
            self._process.kill()
