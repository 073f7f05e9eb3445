"""How the launchers of a job find one another, notice that one is lost, and return the same code. Knows no torch.

Node 0 decides: it gives the job its id once every node is there, and settles the job's record once every node has
ended. The others follow its mark. Without it each goes by exit.json.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.dist.exit_record import ExitCode, ExitRecord
from rlhf.dist.network import address_towards
from rlhf.dist.nodes import BEAT_S, ENDED, GATHERING, LOST_S, RUNNING, NodeMark, Watch, read_mark, write_mark


class _Company:
    """One node's launcher among those of the job; `look` is called a few times a second."""

    def __init__(self, run_folder: Path, mark: NodeMark, *, num_nodes: int) -> None:
        self._run_folder, self.mark, self._num_nodes = run_folder, mark, num_nodes
        self._watch, self._written_at = Watch(), 0.0
        self.trouble: ExitRecord | None = None
        """Why this node cannot go on: another one is lost, or has ended badly."""

    def set_address(self, address: str) -> None:
        """Say where this node can be reached from."""
        self.mark = replace(self.mark, address=address)

    def _write(self, **changes: object) -> None:
        """Bring the mark up to date; written when something changed, or its beat is due."""
        changed = replace(self.mark, **changes)  # type: ignore[arg-type]
        if changed == self.mark and time.monotonic() - self._written_at < BEAT_S:
            return
        self.mark = replace(changed, number=changed.number + 1)
        self._written_at = time.monotonic()
        if self._num_nodes > 1:
            write_mark(self._run_folder, self.mark)


class Hub(_Company):
    """The launcher of node 0."""

    def __init__(self, run_folder: Path, mark: NodeMark, *, num_nodes: int, label: str) -> None:
        super().__init__(run_folder, replace(mark, nonces=(mark.nonce,) + ("",) * (num_nodes - 1)), num_nodes=num_nodes)
        self._label = label
        self.others: dict[int, NodeMark] = {}
        """The last marks of the launchers that have come."""

    def look(self) -> None:
        """Read the others' marks, answer them."""
        for node_rank in range(1, self._num_nodes):
            self._look_at(node_rank)
        nonces = [self.mark.nonce, *("" for _ in range(1, self._num_nodes))]
        for node_rank, other in self.others.items():
            nonces[node_rank] = other.nonce
        whole = self.mark.state == GATHERING and len(self.others) == self._num_nodes - 1 and self.trouble is None
        start = {"state": RUNNING, "job_id": self._new_id()} if whole else {}
        self._write(nonces=tuple(nonces), finding=self.mark.finding or self.trouble, **start)

    def _look_at(self, node_rank: int) -> None:
        mark, known = read_mark(self._run_folder, node_rank), self.others.get(node_rank)
        if mark is None or (known is not None and known.nonce != mark.nonce):
            return
        there = self._watch.look(mark)
        if there == "here" or known is not None:
            self.others[node_rank] = mark
        if node_rank not in self.others or self.trouble is not None:
            return
        if mark.state == ENDED:
            self.trouble = mark.finding
        elif there == "lost":
            self.trouble = lost(mark)
        elif mark.wants != self.mark.wants:
            self.trouble = _differs(self.mark, mark)

    def _new_id(self) -> str:
        return f"{self._label or int(time.time())}-{os.urandom(4).hex()}"

    def address(self) -> str:
        """This node's address on the network that leads to the others."""
        return address_towards(self.others[1].address)

    def missing(self) -> str:
        """Which launchers have not come, as in `nodes 2 and 3`; empty when all have."""
        return name_nodes([n for n in range(1, self._num_nodes) if n not in self.others])

    def all_ended(self) -> bool:
        """Whether no other launcher is at work any more."""
        return all(mark.state == ENDED or self._watch.look(mark) == "lost" for mark in self.others.values())

    def end(self, settle: Callable[[Sequence[ExitRecord]], ExitRecord], *, patience_s: float) -> ExitRecord:
        """Wait until every other node has ended, settle the job's record from their findings, and tell it to all.

        Args:
            settle: Makes the record from what the other nodes found, in the order of nodes.
            patience_s: Longest wait.
        """
        until = time.monotonic() + patience_s
        while not self.all_ended() and time.monotonic() < until:
            time.sleep(0.1)
            self.look()
        found = [mark.finding for _, mark in sorted(self.others.items()) if mark.finding is not None]
        record = settle(found)
        self._write(state=ENDED, finding=record)
        return record


class Member(_Company):
    """The launcher of another node."""

    def look(self) -> None:
        """Read node 0's mark, rewrite this one."""
        hub = self._hub()
        if hub is not None and self.mark.state == GATHERING and hub.state == RUNNING:
            self._write(state=RUNNING, job_id=hub.job_id)
        if hub is not None and self.trouble is None:
            if hub.finding is not None:
                self.trouble = hub.finding
            elif self._watch.look(hub) == "lost":
                self.trouble = lost(hub)
        self._write()

    def _hub(self) -> NodeMark | None:
        """Node 0's mark, if it answers this launcher and not an earlier one in the same folder."""
        hub = read_mark(self._run_folder, 0)
        mine = () if hub is None else hub.nonces[self.mark.node_rank : self.mark.node_rank + 1]
        return hub if mine == (self.mark.nonce,) else None

    def address(self) -> str:
        """This node's address on the network that leads to node 0."""
        return self.mark.address

    def missing(self) -> str:
        """Which launchers have not come, as far as this one can tell."""
        return "node 0"

    def end(self, finding: ExitRecord | None, *, patience_s: float) -> ExitRecord | None:
        """Tell how this node ended and wait for the job's record; None when node 0 cannot give it any more."""
        self._write(state=ENDED, finding=finding)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            hub = self._hub()
            if hub is not None and hub.state == ENDED:
                return hub.finding
            if hub is None or self._watch.look(hub) == "lost":
                return None
            time.sleep(0.1)
            self._write()
        return None


def lost(mark: NodeMark) -> ExitRecord:
    """The launcher of a node is gone without a word."""
    reason = f"{mark.title} is lost: its launcher was killed, or its host has not been heard of for {LOST_S:.0f} s"
    return ExitRecord(code=ExitCode.RANK_FAILED, reason=reason)


def _differs(ours: NodeMark, theirs: NodeMark) -> ExitRecord:
    name = next(name for name in ours.wants if ours.wants[name] != theirs.wants.get(name))
    return ExitRecord(
        code=ExitCode.BAD_INPUT,
        reason=f"{name}: {theirs.wants.get(name)} on {theirs.title}, {ours.wants[name]} on {ours.title}; "
        "needs the same on all nodes; start all of them by one command line",
    )


def name_nodes(node_ranks: Sequence[int]) -> str:
    """`node 1`, `nodes 1, 2 and 5`; long runs are cut after 16."""
    if not node_ranks:
        return ""
    names = [str(n) for n in node_ranks[:16]]
    more = f" and {len(node_ranks) - 16} more" if len(node_ranks) > 16 else ""
    if more or len(names) == 1:
        return ("node " if len(names) == 1 else "nodes ") + ", ".join(names) + more
    return f"nodes {', '.join(names[:-1])} and {names[-1]}"
