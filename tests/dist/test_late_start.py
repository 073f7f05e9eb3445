"""Who is told to be late: pure judgements on hand-made beats."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.dist.exit_record import ExitRecord
from rlhf.dist.heartbeat import Beat
from rlhf.dist.late_start import ALL_JOINED, NOT_YET, late_start

JOINED = Beat(rank=4, host="b", machine="m", pid=1, started=1.0, ticks=1)
WAITS = replace(JOINED, rank=5, ticks=0, waits=True, where="distributed_c10d.py:9 init")
STUCK = replace(JOINED, rank=5, ticks=0, where="job.py:7 _choose_device")


def judge(*beats: Beat, over_s: float = 0.0) -> ExitRecord | str:
    log = Path("launcher_2.log")
    return late_start(beats, range(4, 6), node="node 2 (host b)", over_s=over_s, limit_s=30.0, launcher_log=log)


@pytest.mark.parametrize(
    ("beats", "over_s", "rank", "says"),
    [
        ((), 0.0, 4, "rank 4 of node 2 (host b) has not begun within 30 s, nor have 1 more of its ranks"),
        ((JOINED,), 0.0, 5, "rank 5 of node 2 (host b) has not begun within 30 s; see launcher_2.log"),
        ((JOINED, STUCK), 0.0, 5, "it is in phase start at job.py:7 _choose_device"),
        ((replace(WAITS, rank=4), STUCK), 9.0, 5, "has not joined the job within 30 s"),
        ((JOINED, WAITS), 5.0, None, "the nodes do not reach one another"),
    ],
)
def test_the_late_rank_is_named(beats: tuple[Beat, ...], over_s: float, rank: int | None, says: str) -> None:
    late = judge(*beats, over_s=over_s)
    assert isinstance(late, ExitRecord)
    assert (late.code, late.rank) == (3, rank)
    assert says in late.reason


def test_ranks_that_wait_leave_the_word_to_the_late_ones() -> None:
    assert judge(JOINED, WAITS, over_s=4.9) == NOT_YET
    assert judge(JOINED, replace(JOINED, rank=5)) == ALL_JOINED
