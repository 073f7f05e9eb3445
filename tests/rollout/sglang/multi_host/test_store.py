"""The store that only those who know a token may speak to: torch's groups over it, strangers, ends of members."""

import json
import queue
import socket
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhf.rollout.sglang.multi_host import store
from rlhf.rollout.sglang.multi_host.store import GuardedStore, Line, StoreServer


@pytest.fixture
def lost():
    return queue.Queue()


@pytest.fixture
def where(lost):
    listening = socket.create_server(("127.0.0.1", 0))
    StoreServer(listening, "secret", on_lost=lambda *told: lost.put(told))
    yield listening.getsockname()
    listening.close()


def test_it_answers_as_torchs_own_stores_do(where):
    ours, theirs = GuardedStore(*where, "secret"), dist.HashStore()
    for one in (ours, theirs):
        one.set_timeout(timedelta(seconds=0.2))

    def said(one: dist.Store) -> list[object]:
        found = [one.set("a", b"\x00\xff"), one.get("a"), one.add("n", 3), one.add("n", -1), one.get("n")]
        found += [one.check(["a", "n"]), one.check(["a", "b"]), one.wait(["a", "n"]), one.num_keys()]
        found += [one.compare_set("a", "other", "x"), one.compare_set("a", b"\x00\xff", "x"), one.get("a")]
        found += [one.compare_set("new", "", "y"), one.get("new"), one.compare_set("none", "z", "y")]
        found += [one.delete_key("a"), one.delete_key("a"), one.check(["a"])]
        return found

    assert said(ours) == said(theirs)
    for call in (lambda: ours.get("never"), lambda: ours.wait(["n", "never"], timedelta(seconds=0.1))):
        with pytest.raises(dist.DistStoreError, match="never"):
            call()


def test_who_waits_is_woken_by_another_and_a_waiting_thread_holds_up_nobody(where):
    one, other = GuardedStore(*where, "secret"), GuardedStore(*where, "secret")
    found: queue.Queue[bytes] = queue.Queue()
    waits = threading.Thread(target=lambda: found.put(one.get("late")), daemon=True)
    waits.start()
    one.set("early", "1")  # by the same store, on another thread
    other.set("late", "2")
    assert found.get(timeout=10) == b"2"
    waits.join(timeout=10)


def reduce(rank: int, where: tuple[str, int], folder: Path) -> None:
    made = dist.PrefixStore("a", GuardedStore(*where, "secret"))  # as torch does; nobody else holds the store
    dist.init_process_group("gloo", store=made, rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    found = torch.tensor([1.0 + rank])
    dist.all_reduce(found, group=group)
    (folder / str(rank)).write_text(str(found.item()))
    dist.destroy_process_group()


@pytest.mark.dist
def test_groups_of_torch_form_over_it(where, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(reduce, args=(where, tmp_path), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["3.0", "3.0"]


def test_strangers_are_cut_off_before_anything_of_theirs_is_read(where, monkeypatch):
    with pytest.raises(ConnectionError, match="gone"):
        GuardedStore(*where, "guess").num_keys()
    monkeypatch.setattr(store, "_receive", lambda _: pytest.fail("a stranger's message was read"))
    body = json.dumps({"do": "count", "keys": []}).encode()
    with socket.create_connection(where) as stranger:
        stranger.settimeout(10)
        nonce = stranger.recv(32)
        stranger.sendall((struct.pack("<I", len(body)) + body).ljust(64, b"\0"))
        assert stranger.recv(1) == b""
    with socket.create_connection(where) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(32) != nonce  # so that no proof is good twice


def test_a_server_that_does_not_know_the_token_is_not_trusted():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.sendall(b"n" * 32)
                connected.recv(64)
                connected.sendall(b"p" * 32)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="server does not know the token"):
            GuardedStore(*listening.getsockname(), "secret").get("anything")


def test_a_member_that_has_begun_to_beat_and_is_silent_is_lost(where, lost, monkeypatch):
    monkeypatch.setattr(store, "LOOK_S", 0.05)
    quiet, beating, silent = (Line(*where, "secret", name=name) for name in ("host a", "host b", "host c"))
    silent.beat()
    for _ in range(30):
        beating.beat()
        time.sleep(0.05)
    assert lost.get(timeout=10) == ("host c", "its host has given no sign of life for 0.75 s: stopped, or cut off")
    assert lost.empty()  # who does not beat yet still starts
    for line in (quiet, beating):
        line._connected.close()


def test_the_server_hears_a_members_last_word_or_its_silence_and_a_member_the_servers_end(where, lost):
    first, second = (Line(*where, "secret", name=name) for name in ("host b", "host c"))
    first.last_word("scheduler tp 1 was killed")
    assert lost.get(timeout=10) == ("host b", "scheduler tp 1 was killed")
    second._connected.close()
    assert lost.get(timeout=10) == ("host c", "")
    ours, theirs = socket.socketpair()
    theirs.close()
    first._connected = ours
    first.await_end()
