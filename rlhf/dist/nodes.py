"""What the launchers of a job's nodes tell each other: one small file a node in runs/NAME/nodes. Knows no torch.

Node 0 reads the marks of all others and answers in its own, which all others read. Each file has one writer. Nothing
depends on the hosts' clocks: on another host a launcher counts as there once its mark was seen to change.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rlhf.dist.exit_record import ExitRecord
from rlhf.dist.heartbeat import state_of, this_machine

GATHERING, RUNNING, ENDED = "gathering", "running", "ended"

BEAT_S = 2.0
"""A mark is rewritten this often; network file systems show it to other hosts up to a minute late."""
LOST_S = 90.0
"""A launcher on another host whose mark stands still for so long is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMark:
    """What the launcher of one node says."""

    node_rank: int
    host: str
    machine: str
    """Where pid is valid, as in a Beat."""
    pid: int
    started: float
    nonce: str
    """Drawn anew by each launcher: tells this start from every other one in the folder."""
    address: str = ""
    """Where it can be reached from node 0's network."""
    wants: dict[str, str] = field(default_factory=dict)
    """What must be the same on all nodes, by name."""
    number: int = 0
    """Grows each time the mark is written."""
    state: str = GATHERING
    """gathering, running (torchrun is) or ended."""
    finding: ExitRecord | None = None
    """Ended: how, as seen from this node; None when its torchrun came through. Of node 0, the job's record."""
    job_id: str = ""
    """Of node 0: the job's id, once all nodes are there."""
    nonces: tuple[str, ...] = ()
    """Of node 0: the nonce of each node whose mark it has seen, by node, else empty; says whom it answers."""

    @property
    def title(self) -> str:
        """`node 1 (host b)`."""
        return f"node {self.node_rank} (host {self.host})"


def mark_path(run_folder: Path, node_rank: int) -> Path:
    """File of a launcher's mark."""
    return run_folder / "nodes" / f"node_{node_rank}.json"


def new_mark(node_rank: int, *, host: str, wants: dict[str, str]) -> NodeMark:
    """The first mark of this process."""
    process = psutil.Process()
    return NodeMark(
        node_rank=node_rank,
        host=host,
        machine=this_machine(),
        pid=process.pid,
        started=process.create_time(),
        nonce=os.urandom(6).hex(),
        wants=wants,
    )


def write_mark(run_folder: Path, mark: NodeMark) -> None:
    """Readers see the old mark or the new one, never half."""
    path = mark_path(run_folder, mark.node_rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(mark)) + "\n")
    fresh.replace(path)


def read_mark(run_folder: Path, node_rank: int) -> NodeMark | None:
    """The mark, or None when there is none."""
    try:
        fields = json.loads(mark_path(run_folder, node_rank).read_text())
        finding = fields["finding"]
        fields |= {"nonces": tuple(fields["nonces"]), "finding": None if finding is None else ExitRecord(**finding)}
        return NodeMark(**fields)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


class Watch:
    """Whether other launchers are there, from their marks and this process's clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int, float]] = {}
        self._moved: set[str] = set()

    def look(self, mark: NodeMark) -> str:
        """here, lost, or unsure: a mark on another host that has not changed under our eyes may be an old one."""
        if mark.machine == this_machine():
            return "lost" if state_of(mark.pid, mark.started) == "dead" else "here"
        nonce, number, since = self._seen.get(mark.node_rank, ("", -1, 0.0))
        if nonce == mark.nonce and number != mark.number:
            self._moved.add(nonce)
        if (nonce, number) != (mark.nonce, mark.number):
            self._seen[mark.node_rank] = (mark.nonce, mark.number, since := time.monotonic())
        if mark.nonce not in self._moved:
            return "unsure"
        return "lost" if time.monotonic() - since > LOST_S else "here"
