"""The memory that a transfer needs beside the parameters: two flat buffers, used in turn."""

import torch
from torch import Tensor

from rlhf.reshard.transport import torch_dtype


class Staging:
    """While one bucket is under way the next is packed into the other buffer.

    Buffers are kept from one transfer to the next, and grow to what is really staged: messages that lie contiguous in
    the parameters of their rank need none.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = torch_dtype(dtype)
        self._buffers: list[Tensor | None] = [None, None]
        self._in_use = [0, 0]
        self.used_bytes = 0
        """Most bytes in use at one time since `begin`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers if buffer is not None)

    def begin(self) -> None:
        """A transfer starts: nothing is in use."""
        self._in_use, self.used_bytes = [0, 0], 0

    def take(self, number: int, num_elements: int, device: torch.device) -> Tensor:
        """Room for what bucket `number` stages, in place of what bucket `number` - 2 staged."""
        at = number % 2
        buffer = self._buffers[at]
        if buffer is None or buffer.device != device or buffer.numel() < num_elements:
            self._buffers[at] = buffer = None  # freed before its successor is there
            self._buffers[at] = buffer = torch.empty(num_elements, dtype=self._dtype, device=device)
        self._in_use[at] = num_elements * self._dtype.itemsize
        self.used_bytes = max(self.used_bytes, sum(self._in_use))
        return buffer[:num_elements]
