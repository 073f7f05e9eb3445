"""Products with packed weights."""

import pytest
import torch

from rlhf.rollout.native.linear import Linear


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 38)])
@pytest.mark.parametrize("rows", [1, 8, 56])
def test_packing_changes_no_product_and_a_written_weight_counts_after_the_next_packing(rows, bias):
    weight, hidden = torch.randn(38, 21), torch.randn(rows, 21)
    linear = Linear(weight, bias)
    for _ in range(2):
        expected = hidden @ weight.T + (0 if bias is None else bias)
        linear.unpack()
        torch.testing.assert_close(linear(hidden), expected, atol=1e-5, rtol=1e-5)
        linear.pack()
        torch.testing.assert_close(linear(hidden), expected, atol=1e-5, rtol=1e-5)
        weight.add_(1.0)
