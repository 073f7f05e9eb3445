"""A thread on each rank that ends the job when a rank hangs, was stopped or has died. Calls no collective.

A rank watches itself, the ranks on its host and one rank on another host, so that a rank that was stopped (and cannot
run a watchdog of its own) is named by its peers.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf.dist.exit_record import exit_path
from rlhf.dist.heartbeat import RUNNING, Beat, Heart, beat_path, process_state, read_beat
from rlhf.dist.progress_clock import ProgressClock

SHORTEST_PERIOD_S = 0.2  # between two beats, however often the phase changes
ENDED_GRACE_S = 10.0  # torchrun ends the ranks of its own host sooner; this is for other hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When a rank counts as lost, in seconds."""

    alive_s: float
    """Without a beat."""
    progress_s: float
    """Without a tick."""

    @property
    def period_s(self) -> float:
        """Time between beats."""
        return min(5.0, self.alive_s / 6, self.progress_s / 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerView:
    """Another rank, as seen from here."""

    beat: Beat
    silent_s: float
    """Seconds, on this rank's clock, since its beat last changed."""
    process: str
    """running, stopped or dead; unknown on another machine."""

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return self.beat.idle_s + self.silent_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """A rank that holds the job up, or broke it."""

    beat: Beat
    reason: str
    silent: bool = False
    """It does not beat: its process is stopped, or in a state in which it hears no signal."""


def dead_peer(peers: Iterable[PeerView]) -> Blame | None:
    """A rank whose process ended without a goodbye."""
    for peer in peers:
        if peer.process == "dead" and peer.beat.state == RUNNING:
            return Blame(
                beat=peer.beat,
                reason=f"{peer.beat.title} died without a traceback (killed from outside, out of memory, or a crash "
                f"in C); it was {peer.beat.doing}",
            )
    return None


def silent_peer(peers: Iterable[PeerView], limits: Limits) -> Blame | None:
    """The rank that has not beaten for longest, if that is too long."""
    lost = [peer for peer in peers if peer.silent_s > limits.alive_s and peer.beat.state == RUNNING]
    if not lost:
        return None
    worst = max(lost, key=lambda peer: peer.silent_s)
    stopped = "; its process is stopped" if worst.process == "stopped" else ""
    return Blame(
        beat=worst.beat,
        reason=f"{worst.beat.title} has not moved for {worst.silent_s:.0f} s; it was {worst.beat.doing}{stopped}",
        silent=True,
    )


def hung_rank(own: Beat, peers: list[PeerView], limits: Limits) -> Blame | None:
    """Who is to blame when this rank has made no progress for too long.

    A rank inside a collective waits for others: it is no fault of its own, and none at all while one of them moves.
    """
    idle = {own.rank: own.idle_s} | {peer.beat.rank: peer.idle_s for peer in peers if peer.beat.state == RUNNING}
    beats = {own.rank: own} | {peer.beat.rank: peer.beat for peer in peers if peer.beat.state == RUNNING}
    if own.idle_s <= limits.progress_s or (own.waits and min(idle.values()) <= limits.progress_s / 2):
        return None
    busy = [rank for rank in idle if not beats[rank].waits and idle[rank] > limits.progress_s / 2]
    worst = beats[max(busy or idle, key=lambda rank: idle[rank])]
    others = "; ".join(
        f"rank {rank}: {idle[rank]:.0f} s {beat.doing}{' (waits)' if beat.waits else ''}"
        for rank, beat in sorted(beats.items())[:16]
        if rank != worst.rank
    )
    return Blame(
        beat=worst,
        reason=f"{worst.title} has made no progress for {idle[worst.rank]:.0f} s; it is {worst.doing}"
        + (f". Others: {others}" if others else ""),
    )


class Watchdog:
    """Beats for this rank and watches its peers, from a thread."""

    def __init__(
        self,
        run_folder: Path,
        *,
        heart: Heart,
        clock: ProgressClock,
        watched: Iterable[int],
        limits: Limits,
        launched: bool = False,
        on_blame: Callable[[Blame], None],
        on_ended: Callable[[], None],
    ) -> None:
        """`on_blame` and `on_ended` are called on the thread and do not return in a real job.

        Args:
            run_folder: Where beats and the exit record lie.
            heart: Writes this rank's beats.
            clock: This rank's progress.
            watched: Ranks to watch.
            limits: When a rank counts as lost.
            launched: A launcher watches the start, with a time limit of its own; ranks are not judged by each other
                for slow progress until they have joined.
            on_blame: A rank is lost or hangs.
            on_ended: Another rank ended the job a while ago (its exit record says how), but this one still runs.
        """
        self._ended, self._on_ended, self._ended_since = exit_path(run_folder), on_ended, 0.0
        self._paths = {rank: beat_path(run_folder, rank) for rank in watched}
        self._heart, self._clock, self._limits, self._on_blame = heart, clock, limits, on_blame
        self._launched = launched
        self._changed: dict[int, tuple[int, float]] = {}
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlhf-watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._heart.beat()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._quit.set()
        self._clock.changed.set()
        self._thread.join()

    def peers(self) -> list[PeerView]:
        """The watched ranks that have said something so far."""
        now = time.monotonic()
        return [view for rank in self._paths if (view := self._view(rank, now)) is not None]

    def _view(self, rank: int, now: float) -> PeerView | None:
        before = read_beat(self._paths[rank])
        if before is None:
            return None
        process = process_state(before)
        beat = read_beat(self._paths[rank]) or before  # read after the process was seen: its goodbye is not missed
        number, since = self._changed.get(rank, (-1, now))
        if number != beat.number:
            self._changed[rank] = (beat.number, since := now)
        return PeerView(beat=beat, silent_s=now - since, process=process)

    def _run(self) -> None:
        period, last = self._limits.period_s, time.monotonic()
        while not self._quit.wait(min(period, SHORTEST_PERIOD_S)):
            self._clock.changed.wait(period)  # a new phase is put on record at once
            self._clock.changed.clear()
            now = time.monotonic()
            if now - last > self._limits.alive_s / 2 + period:  # this process stood still itself: judge nobody by that
                self._clock.excuse(now - last)
                self._changed.clear()
            last = now
            own = self._heart.beat()
            if own.state != RUNNING or self._quit.is_set():
                continue
            blame = self._judge(own)
            if blame is not None:
                self._on_blame(blame)
            if self._ended.exists():
                self._ended_since = self._ended_since or now
                if now - self._ended_since > ENDED_GRACE_S:
                    self._on_ended()

    def _judge(self, own: Beat) -> Blame | None:
        peers = self.peers()
        lost = dead_peer(peers) or silent_peer(peers, self._limits)
        if lost is not None or (self._launched and own.ticks == 0):
            return lost
        return hung_rank(own, peers, self._limits)
