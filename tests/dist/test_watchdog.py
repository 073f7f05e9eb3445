"""Who is blamed: pure judgements on hand-made beats."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf.dist.exit_record import ExitRecord, claim
from rlhf.dist.heartbeat import (
    FINISHED,
    TERMINATED,
    Beat,
    Heart,
    main_thread_place,
    process_state,
    read_beat,
    read_beats,
)
from rlhf.dist.progress_clock import ProgressClock
from rlhf.dist.watchdog import Blame, Limits, PeerView, Watchdog, dead_peer, hung_rank, silent_peer

LIMITS = Limits(alive_s=30.0, progress_s=100.0)


def beat(rank: int, **changes: object) -> Beat:
    plain = Beat(
        rank=rank, host="here", machine="m", pid=1000 + rank, started=1.0, phase="update", where="loop.py:7 step"
    )
    return replace(plain, **changes)


def peer(rank: int, *, silent_s: float = 0.0, process: str = "running", **changes: object) -> PeerView:
    return PeerView(beat=beat(rank, **changes), silent_s=silent_s, process=process)


def test_a_dead_process_is_blamed_unless_it_said_goodbye() -> None:
    assert (
        dead_peer([peer(1), peer(2, process="dead", state=FINISHED), peer(3, process="dead", state=TERMINATED)]) is None
    )
    blame = dead_peer([peer(1), peer(2, process="dead")])
    assert blame is not None
    assert blame.beat.rank == 2
    assert "in phase update at loop.py:7 step" in blame.reason


def test_the_longest_silence_is_blamed() -> None:
    assert silent_peer([peer(1, silent_s=29.0), peer(2, silent_s=90.0, state=FINISHED)], LIMITS) is None
    blame = silent_peer([peer(1, silent_s=31.0), peer(2, silent_s=47.0, process="stopped")], LIMITS)
    assert blame is not None
    assert blame.silent
    assert blame.reason == (
        "rank 2 (host here, pid 1002) has not moved for 47 s; it was in phase update at loop.py:7 step; "
        "its process is stopped"
    )


@pytest.mark.parametrize(
    ("own", "peers", "blamed"),
    [
        pytest.param(beat(0, idle_s=99.0), [], None, id="within the limit"),
        pytest.param(beat(0, idle_s=101.0), [peer(1, idle_s=3.0)], 0, id="I hang, the other moves"),
        pytest.param(beat(0, idle_s=101.0, waits=True), [peer(1, idle_s=3.0)], None, id="I wait for one that moves"),
        pytest.param(
            beat(0, idle_s=101.0, waits=True),
            [peer(1, idle_s=102.0, waits=True), peer(2, idle_s=80.0)],
            2,
            id="all stand, one does not wait",
        ),
        pytest.param(
            beat(0, idle_s=101.0, waits=True), [peer(1, idle_s=130.0, waits=True)], 1, id="all wait: the longest"
        ),
        pytest.param(
            beat(0, idle_s=101.0, waits=True), [peer(1, idle_s=5.0, state=FINISHED)], 0, id="the other has left"
        ),
    ],
)
def test_who_hangs(own: Beat, peers: list[PeerView], blamed: int | None) -> None:
    blame = hung_rank(own, peers, LIMITS)
    assert (None if blame is None else blame.beat.rank) == blamed


def test_a_beat_reads_back_and_the_process_is_known_by_its_start(tmp_path: Path) -> None:
    clock = ProgressClock()
    heart = Heart(tmp_path, rank=3, host="here", clock=clock)
    clock.tick("rollout")
    written = heart.beat()
    assert read_beats(tmp_path) == [written]
    assert (written.phase, written.ticks, written.number, written.state) == ("rollout", 1, 1, "running")
    assert "test_watchdog.py" in written.where
    assert process_state(written) == "running"
    assert process_state(replace(written, started=written.started - 10)) == "dead"  # the pid was given to another
    assert process_state(replace(written, machine="another")) == "unknown"
    assert heart.beat(FINISHED).state == heart.beat().state == FINISHED


def test_half_a_beat_is_no_beat(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "none.json") is None
    (tmp_path / "half.json").write_text('{"rank": 1, "ho')
    assert read_beat(tmp_path / "half.json") is None


def test_waiting_is_declared_and_ticks_count() -> None:
    clock = ProgressClock()
    with clock.waiting("rows of the reward pool"):
        assert clock.declared_waiting
        assert clock.what == "rows of the reward pool"
    assert not clock.declared_waiting
    assert clock.ticks == 2
    before = clock.idle_s
    clock.excuse(5.0)
    assert clock.idle_s < before  # the time asleep is not counted


def test_the_thread_finds_a_peer_whose_beat_stands_still(tmp_path: Path) -> None:
    clock, found = ProgressClock(), []
    gone = Heart(tmp_path, rank=1, host="elsewhere", clock=clock)
    gone.beat()
    watchdog = Watchdog(
        tmp_path,
        heart=Heart(tmp_path, rank=0, host="here", clock=clock),
        clock=clock,
        watched=[1],
        limits=Limits(alive_s=0.6, progress_s=1000.0),
        on_blame=found.append,
        on_ended=lambda: None,
    )
    watchdog.start()
    until = time.monotonic() + 30
    while not found and time.monotonic() < until:
        time.sleep(0.05)
    watchdog.close()
    blame: Blame = found[0]
    assert (blame.beat.rank, blame.silent) == (1, True)


def test_a_rank_that_outlives_the_job_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.dist.watchdog.ENDED_GRACE_S", 0.1)
    clock, told = ProgressClock(), []
    claim(tmp_path, ExitRecord(code=3, reason="rank 7 of another host broke", rank=7))
    watchdog = Watchdog(
        tmp_path,
        heart=Heart(tmp_path, rank=0, host="here", clock=clock),
        clock=clock,
        watched=[],
        limits=Limits(alive_s=0.6, progress_s=1000.0),
        on_blame=lambda blame: None,
        on_ended=lambda: told.append(True),
    )
    watchdog.start()
    until = time.monotonic() + 30
    while not told and time.monotonic() < until:
        time.sleep(0.05)
    watchdog.close()
    assert told


def test_a_line_that_waits_for_a_transfer_is_known_to_wait() -> None:
    lock, places = threading.Lock(), []
    transfer = SimpleNamespace(wait=lock.acquire)  # C code, as the wait of a posted transfer
    lock.acquire()

    def look() -> None:
        time.sleep(0.3)
        places.append(main_thread_place())
        lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    transfer.wait()
    thread.join()
    where, waits, debugged = places[0]
    assert waits
    assert not debugged
    assert "test_a_line_that_waits" in where


def test_a_place_between_two_lines_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code = SimpleNamespace(co_filename="/a/b/c/loop.py", co_firstlineno=7, co_name="step")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    monkeypatch.setattr("sys._current_frames", lambda: {threading.main_thread().ident: frame})
    assert main_thread_place() == ("b/c/loop.py:7 step", False, False)
