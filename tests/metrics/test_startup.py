"""The table of ranks printed at start."""

from rlhf.metrics.startup import RankRow, startup_table


def test_every_rank_shows_its_place_in_each_role():
    rows = [
        RankRow(rank=0, host="n1", device="cuda:0", roles={"actor": {"tp": 0, "pp": 0}, "rollout": {"engine": 0}}),
        RankRow(rank=1, host="n1", device="cuda:1", roles={"actor": {"tp": 1, "pp": 0}}),
        RankRow(rank=10, host="node2", device="cpu", roles={"reference": {"dp": 0}}),
    ]
    assert startup_table(rows).splitlines() == [
        "rank  host   device  actor    rollout  reference",
        "----  -----  ------  -------  -------  ---------",
        "0     n1     cuda:0  tp0 pp0  engine0  -",
        "1     n1     cuda:1  tp1 pp0  -        -",
        "10    node2  cpu     -        -        dp0",
    ]


def test_a_large_job_shows_its_ends():
    rows = [RankRow(rank=r, host=f"n{r // 8}", device="cpu", roles={"actor": {"dp": r}}) for r in range(1000)]
    lines = startup_table(rows, max_rows=4).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "...", "998", "999"]
    assert lines[4] == "... 996 more ranks"
