"""Matrix products with weights that stay the same for thousands of steps: on CPUs they are packed once."""

import torch
from torch import Tensor
from torch.nn import functional

ROW_STEP = 8
"""Rows of a product are a multiple of this. On CPUs fewer rows take as long, since reading the weights takes the time.
And from two rows on oneDNN's result for a row does not depend, to the bit, on the other rows or their number (seen with
torch 2.13 on AVX-512, 1 and 2 threads, 2 to 4096 rows)."""


class Linear:
    """hidden @ weight^T + bias for hidden [rows, in] and weight [out, in].

    `pack` copies the weight into the order that oneDNN's kernels read; it is a copy, so pack again after the weight was
    written to. MKL and `linear` put the weight into such an order at every call, which with 64 rows takes a third of
    the time, with 16 rows half. Not packed: weights on other devices or of other dtypes than float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Copy the weight as it is now."""
        weight = self._weight
        if weight.device.type == "cpu" and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_STEP)

    def unpack(self) -> None:
        """Forget the copy."""
        self._packed = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, out], contiguous."""
        if self._packed is None:
            return functional.linear(hidden, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self._bias, "none", [], "")
