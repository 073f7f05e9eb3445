"""Fault: without Transformer Engine SwiGLU is either compiled at run time or takes four passes more than it needs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megatron_patches.patch import Patch


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up for [.., 2 F], gate before up. Keeps its input alone; both gradients are written in place."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


def swiglu(
    gate_up: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """SwiGLU of [T, B, 2 F] or [T, 2 F] after adding a bias; differentiable once."""
    assert not fp8_input_store, "inputs are not kept in fp8 here"
    assert not cpu_offload_input, "activations are not offloaded here"
    return _SwiGLU.apply(gate_up if bias is None else gate_up + bias)


PATCH = Patch(
    target="megatron.core.transformer.mlp:bias_swiglu_impl",
    source_sha="af184648d911",
    replacement=swiglu,
    why="the fused function wants a compiler at run time; the unfused one keeps two intermediates and concatenates",
    drop_when="an eager fused SwiGLU is in core",
)
