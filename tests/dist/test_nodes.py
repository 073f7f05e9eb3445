"""Launchers that find one another by files: what each concludes from the others' marks."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.dist.exit_record import ExitRecord
from rlhf.dist.gathering import Hub, Member, name_nodes
from rlhf.dist.network import address_towards, interface_of
from rlhf.dist.nodes import ENDED, RUNNING, NodeMark, Watch, new_mark, read_mark, write_mark

WANTS = {"program": "rlhf.train a.yaml"}


def mark(node_rank: int, **changes: object) -> NodeMark:
    return replace(new_mark(node_rank, host=f"h{node_rank}", wants=WANTS), **changes)


def company(folder: Path, num_nodes: int, **changes: object) -> tuple[Hub, list[Member]]:
    members = [Member(folder, mark(n, **changes), num_nodes=num_nodes) for n in range(1, num_nodes)]
    return Hub(folder, mark(0), num_nodes=num_nodes, label="7.0"), members


def look(*launchers: Hub | Member) -> None:
    for launcher in launchers:
        launcher.look()


def first_of(found: Sequence[ExitRecord]) -> ExitRecord:
    return [*found, ExitRecord(code=0, reason="finished")][0]


def test_a_mark_reads_back(tmp_path: Path) -> None:
    written = mark(3, finding=ExitRecord(code=3, reason="it broke", rank=2), nonces=("a", ""))
    assert read_mark(tmp_path, 3) is None
    write_mark(tmp_path, written)
    assert read_mark(tmp_path, 3) == written
    (tmp_path / "nodes/node_3.json").write_text("{")
    assert read_mark(tmp_path, 3) is None


def test_the_job_gets_its_id_once_all_are_there(tmp_path: Path) -> None:
    hub, (first, second) = company(tmp_path, 3)
    look(first, hub)
    assert (hub.mark.job_id, hub.missing()) == ("", "node 2")
    look(second, hub, first, second)
    assert hub.mark.job_id.startswith("7.0-")
    assert {hub.mark.job_id} == {first.mark.job_id, second.mark.job_id}
    again, _ = company(tmp_path / "again", 1)
    again.look()
    assert again.mark.job_id != hub.mark.job_id  # the same label
    assert not (tmp_path / "again").exists()  # one node has nobody to tell


def test_marks_of_an_earlier_job_are_not_taken_for_this_one(tmp_path: Path) -> None:
    write_mark(tmp_path, mark(0, pid=2**22 + 5, state=RUNNING, job_id="old", nonces=("x", "y")))
    write_mark(tmp_path, mark(1, pid=2**22 + 5, state=RUNNING))
    hub, (member,) = company(tmp_path, 2)
    member_before = Member(tmp_path / "elsewhere", member.mark, num_nodes=2)
    look(member_before)
    hub.look()
    assert hub.missing() == "node 1"  # its mark is of a process that is gone
    write_mark(tmp_path, mark(0, state=RUNNING, job_id="old", nonces=("x", "y")))
    member.look()
    assert member.mark.job_id == ""
    assert member.trouble is None


def test_nodes_that_were_started_differently_are_told(tmp_path: Path) -> None:
    hub, (member,) = company(tmp_path, 2, wants={"program": "rlhf.train b.yaml"})
    look(member, hub, member)
    assert hub.trouble == member.trouble
    assert hub.trouble.code == 2
    assert hub.trouble.reason.startswith("program: rlhf.train b.yaml on node 1 (host h1), rlhf.train a.yaml on node 0")


def test_a_lost_launcher_is_trouble_for_all(tmp_path: Path) -> None:
    hub, (first, second) = company(tmp_path, 3)
    look(first, second, hub, first, second)
    write_mark(tmp_path, replace(second.mark, pid=2**22 + 5))
    look(hub, first)
    assert "node 2 (host h2) is lost" in hub.trouble.reason
    assert first.trouble == hub.trouble


def test_all_return_the_record_that_node_0_settles(tmp_path: Path) -> None:
    hub, (first, second) = company(tmp_path, 3)
    look(first, second, hub, first, second)
    broke = ExitRecord(code=3, reason="it broke", rank=5)
    assert second.end(broke, patience_s=0) is None  # node 0 is still at work
    assert first.end(None, patience_s=0) is None
    assert hub.end(first_of, patience_s=5) == broke
    assert first.end(None, patience_s=5) == second.end(broke, patience_s=5) == broke


def test_without_node_0_a_node_is_on_its_own(tmp_path: Path) -> None:
    hub, (member,) = company(tmp_path, 2)
    look(member, hub, member)
    write_mark(tmp_path, replace(hub.mark, pid=2**22 + 5))
    member.look()
    assert "node 0 (host h0) is lost" in member.trouble.reason
    assert member.end(None, patience_s=60) is None


def test_on_another_host_only_what_moves_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, far = Watch(), mark(1, machine="another")
    assert watch.look(far) == "unsure"
    assert watch.look(far) == "unsure"  # an old mark does not move
    assert watch.look(replace(far, number=1)) == "here"
    assert watch.look(replace(far, number=1)) == "here"
    monkeypatch.setattr("rlhf.dist.nodes.LOST_S", -1.0)
    assert watch.look(replace(far, number=1)) == "lost"
    assert watch.look(mark(2)) == "here"  # this process
    assert watch.look(mark(2, pid=os.getpid(), started=1.0)) == "lost"  # the pid of another one, long ago


def test_a_late_mark_does_not_change_an_end(tmp_path: Path) -> None:
    hub, (member,) = company(tmp_path, 2)
    failed = ExitRecord(code=2, reason="port is taken")
    assert hub.end(lambda _: failed, patience_s=0) == failed
    look(member, hub, member)
    assert (hub.mark.state, hub.mark.job_id) == (ENDED, "")
    assert member.trouble == failed


def test_nodes_are_named_in_words() -> None:
    assert [name_nodes(n) for n in ([], [4], [1, 2], [1, 2, 5])] == ["", "node 4", "nodes 1 and 2", "nodes 1, 2 and 5"]
    assert name_nodes(range(18)).endswith("14, 15 and 2 more")


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert interface_of(address_towards("127.0.0.1")) == "lo"
    assert interface_of("192.0.2.77") == ""  # nobody's
    with pytest.raises(OSError, match="Name or service not known|Temporary failure|No address"):
        address_towards("no.such.host.invalid")
