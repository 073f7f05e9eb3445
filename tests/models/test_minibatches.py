"""How an update is cut does not depend on the layout."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.grid import Grid
from rlhf.mcore.train_step import StepReport
from rlhf.models.calls import Deal
from rlhf.models.minibatches import Cut, UpdateReport


def test_every_epoch_takes_each_minibatch_once() -> None:
    cut = Cut(num_rows=10, minibatch_rows=4, epochs=3, seed=5)
    order = cut.order()
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert order == cut.order()


@given(dp=st.integers(1, 5), num_rows=st.integers(1, 23), minibatch_rows=st.integers(1, 8))
def test_a_minibatch_holds_the_same_rows_whatever_dp_is(dp: int, num_rows: int, minibatch_rows: int) -> None:
    deal = Deal(tuple(range(num_rows)), Grid(("tp", "pp", "dp"), (1, 1, dp)))
    found: dict[int, list[int]] = {}
    for dp_rank in range(dp):
        positions = torch.tensor(list(deal.positions(dp_rank)), dtype=torch.int64)
        number = (dp_rank + dp * torch.arange(len(positions))) // minibatch_rows  # as run_minibatches does
        for m, position in zip(number.tolist(), positions.tolist(), strict=True):
            found.setdefault(m, []).append(position)
    for m, rows in found.items():
        assert sorted(rows) == list(range(m * minibatch_rows, min(num_rows, (m + 1) * minibatch_rows)))


def test_report_leaves_skipped_steps_out_of_the_norms() -> None:
    taken = StepReport({"loss": 2.0, "policy_tokens": 4.0}, 3.0, 0.5, 1e-3, skipped=False)
    skipped = StepReport({"loss": 4.0, "policy_tokens": 6.0}, float("nan"), 1.0, 2e-3, skipped=True)
    report = UpdateReport.of([taken, skipped])
    assert (report.loss, report.grad_norm, report.clip_factor) == (3.0, 3.0, 0.5)
    assert (report.optimizer_steps, report.skipped_steps, report.lr) == (2, 1, 2e-3)
    assert report.sums["policy_tokens"] == 10.0
