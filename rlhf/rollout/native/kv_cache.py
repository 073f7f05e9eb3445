"""Keys and values of the running sequences: one slot each, contiguous, all slots equally long.

Slots rather than pages: torch has no paged attention for CPUs, and gathering pages into contiguous memory would read
and write all keys and values once more at every step. A step reads the first slots up to the longest running sequence,
without a copy.
"""

from math import ceil, prod

import torch
from torch import Tensor

from rlhf.rollout.native.memory import SPAN_STEP


class KvCache:
    """Room for `tokens` tokens (rounded up to SPAN_STEP) in every layer, cut into slots by `cut`.

    Shape of a layer's view: [2 (keys, values), slots, kv_heads, slot_tokens, head_dim].
    """

    def __init__(
        self, *, num_layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        tokens = ceil(tokens / SPAN_STEP) * SPAN_STEP
        self.tokens, self._kv_heads, self._head_dim = tokens, kv_heads, head_dim
        # zeros, since a masked entry still is 0 * value: memory that happens to hold NaN would reach the result
        self._memory: list[Tensor] = [
            torch.zeros(2 * tokens * kv_heads * head_dim, dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self._layers: list[Tensor] = []
        self.num_slots = self.slot_tokens = 0

    def cut(self, *, num_slots: int, slot_tokens: int) -> None:
        """Cut the memory anew; what was in it is lost."""
        assert num_slots * slot_tokens <= self.tokens, "more slots than memory"
        shape = (2, num_slots, self._kv_heads, slot_tokens, self._head_dim)
        used = prod(shape)
        self._layers = [memory[:used].view(shape) for memory in self._memory]
        self.num_slots, self.slot_tokens = num_slots, slot_tokens

    def token_index(self, positions: Tensor) -> Tensor:
        """Where the rows in slots 0.. write the token at their position (int64 [rows]); for `write_tokens`."""
        rows, kv_heads = positions.numel(), self._kv_heads
        slot = torch.arange(rows, device=positions.device).view(-1, 1, 1)
        which = torch.arange(2, device=positions.device).view(1, -1, 1)
        head = torch.arange(kv_heads, device=positions.device)
        start = ((which * self.num_slots + slot) * kv_heads + head) * self.slot_tokens
        return (start + positions.view(-1, 1, 1)).flatten()

    def write_tokens(self, layer: int, index: Tensor, kv: Tensor) -> None:
        """One token of each row: kv [rows, 2 * kv_heads, head_dim], keys first."""
        self._layers[layer].view(-1, self._head_dim).index_copy_(0, index, kv.reshape(-1, self._head_dim))

    def write_prompts(self, layer: int, kv: Tensor, source: Tensor, slots: Tensor) -> None:
        """Prompts [prompts, tokens, 2, kv_heads, head_dim] into slots; slots[i] gets prompt source[i]."""
        length = min(kv.shape[1], self.slot_tokens)
        wanted = kv[:, :length].permute(2, 0, 3, 1, 4)
        if source.numel() != kv.shape[0]:
            wanted = wanted.index_select(1, source)
        self._layers[layer][:, slots, :, :length] = wanted

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, length, head_dim] of the first slots; views."""
        keys, values = self._layers[layer][:, :rows, :, :length]
        return keys, values

    def copy(self, source: list[int], target: list[int], length: int) -> None:
        """The first tokens of slots into other slots."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
