"""Which ranks of a node are not in the job though the time to start is over. Pure; knows no torch."""

from collections.abc import Sequence
from pathlib import Path

from rlhf.dist.exit_record import ExitCode, ExitRecord
from rlhf.dist.heartbeat import Beat

ALL_JOINED, NOT_YET = "all joined", "not yet"
GRACE_S = 5.0
"""Ranks that wait for others are blamed this much later, so that the node of those others speaks first."""


def late_start(
    beats: Sequence[Beat], ranks: Sequence[int], *, node: str, over_s: float, limit_s: float, launcher_log: Path
) -> ExitRecord | str:
    """The record of a start that failed, ALL_JOINED, or NOT_YET when other nodes have the word.

    Args:
        beats: Of the node's ranks that have begun; a rank that has joined the job has ticked.
        ranks: The node's ranks.
        node: Its name.
        over_s: Seconds since the time was over.
        limit_s: The time, in seconds.
        launcher_log: What the node's torchrun said.
    """
    begun, code = {beat.rank for beat in beats}, ExitCode.RANK_FAILED
    if absent := [rank for rank in ranks if rank not in begun]:
        more = f", nor have {len(absent) - 1} more of its ranks" if len(absent) > 1 else ""
        reason = f"rank {absent[0]} of {node} has not begun within {limit_s:.0f} s{more}; see {launcher_log}, or raise "
        return ExitRecord(code=code, reason=f"{reason}--start-timeout", rank=absent[0], phase="start")
    outside = sorted((beat for beat in beats if beat.ticks == 0), key=lambda beat: (beat.waits, beat.rank))
    if not outside:
        return ALL_JOINED
    first = outside[0]
    if not first.waits:
        reason = f"{first.title} of {node} has not joined the job within {limit_s:.0f} s; it is {first.doing}"
        return ExitRecord(code=code, reason=reason, rank=first.rank, phase=first.phase)
    if over_s < GRACE_S:
        return NOT_YET
    return ExitRecord(
        code=code,
        reason=f"{first.title} of {node} has waited {limit_s:.0f} s for the others, {first.doing}: the nodes do not "
        "reach one another; needs an interface that leads to all of them; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or "
        "raise --start-timeout",
    )
