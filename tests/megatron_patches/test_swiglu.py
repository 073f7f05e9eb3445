"""SwiGLU in one autograd function."""

import pytest
import torch

from megatron_patches.mlp.swiglu_is_compiled_or_unfused import swiglu


@pytest.mark.parametrize("shape", [(7, 10), (5, 1, 6), (0, 1, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_the_definition(shape, with_bias):
    gate_up = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) if with_bias else None
    upstream = torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64)
    inputs = [gate_up] if bias is None else [gate_up, bias]

    gate, up = (gate_up if bias is None else gate_up + bias).split(shape[-1] // 2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    found = swiglu(gate_up, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * upstream).sum(), inputs)
    for ours, theirs in zip(torch.autograd.grad((found * upstream).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
