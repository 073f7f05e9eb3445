"""Role calls over gloo: rows reach the right ranks, results come home, disjoint roles overlap."""

import time

import pytest
import torch
import torch.distributed as dist

from rlhf.data.batch import Sequences, TokenScores
from rlhf.data.ragged import Ragged
from rlhf.dist.grid import Grid
from rlhf.models.calls import Deal, RoleCalls
from tests.harness.ranks import run_ranks

OWNERS = (0, 2, 0, 2, 0)  # ranks 0 and 2 own the rows of a batch of five
ORDER = (3, 0, 4, 2, 1)


def _rows(rank: int) -> Sequences:
    mine = [i for i, owner in enumerate(OWNERS) if owner == rank]
    if not mine:
        return Sequences.empty()
    tokens = Ragged.of([torch.arange(i + 3) + 100 * i for i in mine], dtype=torch.int64)
    return Sequences(torch.tensor(mine), tokens, torch.tensor([i + 1 for i in mine]))


def _triple_responses(rows: Sequences) -> TokenScores:
    parts = [row[-n:] * 3.0 for row, n in zip(rows.tokens.rows(), rows.response_lengths.tolist(), strict=True)]
    return TokenScores(Ragged.of(parts, dtype=torch.float32))


def _call(calls: RoleCalls, grid: Grid, compute=_triple_responses):
    return calls.dispatch_rows(Deal(ORDER, grid), compute, _rows(dist.get_rank()), owners=OWNERS, result=TokenScores)


def _results_come_home() -> None:
    rank = dist.get_rank()
    calls = RoleCalls(rank, dist.new_group(list(range(4)), backend="gloo"))
    layouts = [Grid(("tp", "pp", "dp"), sizes) for sizes in ((2, 2, 1), (1, 2, 2), (1, 1, 4), (1, 1, 1))]
    layouts.append(Grid(("tp", "pp", "dp"), (1, 1, 2), first_rank=1))
    for pending in [_call(calls, grid) for grid in layouts]:
        got, expected = pending.collect(), _triple_responses(_rows(rank))
        assert len(got) == len(expected)
        torch.testing.assert_close(got.scores.values, expected.scores.values)
        assert torch.equal(got.scores.lengths, expected.scores.lengths)
    calls.flush()


def _compute_sees_the_deal() -> None:
    calls = RoleCalls(dist.get_rank(), dist.new_group(list(range(4)), backend="gloo"))
    grid = Grid(("tp", "pp", "dp"), (2, 1, 2))
    deal = Deal(ORDER, grid)
    pending = calls.dispatch(deal, lambda rows: rows.sample_ids.tolist(), _rows(dist.get_rank()), owners=OWNERS)
    dp_rank = grid.coords(dist.get_rank())["dp"]
    assert pending.collect() == [ORDER[j] for j in deal.positions(dp_rank)]
    alone = Deal(ORDER, Grid(("tp", "pp", "dp"), (1, 1, 1), first_rank=3))
    answer = calls.dispatch(alone, len, _rows(dist.get_rank()), owners=OWNERS).collect()
    assert answer == (5 if dist.get_rank() == 3 else None)
    calls.flush()


def _disjoint_roles_overlap(swap_dispatch: bool, swap_collect: bool) -> None:
    rank, spans = dist.get_rank(), {}
    calls = RoleCalls(rank, dist.new_group(list(range(4)), backend="gloo"))

    def slow(name: str):
        def compute(rows: Sequences) -> TokenScores:
            start = time.monotonic()
            time.sleep(0.6)
            spans[name] = (start, time.monotonic())
            return _triple_responses(rows)

        return compute

    roles = [("near", Grid(("tp", "pp", "dp"), (2, 1, 1))), ("far", Grid(("tp", "pp", "dp"), (1, 1, 2), 2))]
    dist.barrier()
    pending = [_call(calls, grid, slow(name)) for name, grid in (roles[::-1] if swap_dispatch else roles)]
    for call in pending[::-1] if swap_collect else pending:
        call.collect()
    calls.flush()
    seen: list[dict] = [{} for _ in range(4)]
    dist.all_gather_object(seen, spans)
    near, far = (next(s[name] for s in seen if name in s) for name in ("near", "far"))
    overlap = min(near[1], far[1]) - max(near[0], far[0])
    assert overlap >= 0.8 * min(near[1] - near[0], far[1] - far[0])


def _all_checks() -> None:
    _results_come_home()
    _compute_sees_the_deal()
    for swap_dispatch in (False, True):
        for swap_collect in (False, True):
            _disjoint_roles_overlap(swap_dispatch, swap_collect)


@pytest.mark.dist
def test_rows_go_out_and_results_come_home_and_disjoint_roles_overlap() -> None:
    run_ranks(4, _all_checks)
