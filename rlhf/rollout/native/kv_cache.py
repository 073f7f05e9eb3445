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
        self.num_bytes = sum(memory.nbytes for memory in self._memory)
        self._layers: list[Tensor] = []
        self.num_slots = self.slot_tokens = 0

    def cut(self, *, num_slots: int, slot_tokens: int, num_kept: int = 0, kept_tokens: int = 0) -> None:
        """Cut the memory anew. The first `num_kept` slots keep their first `kept_tokens` tokens; all else is lost."""
        assert num_slots * slot_tokens <= self.tokens, "more slots than memory"
        assert num_kept <= num_slots and kept_tokens <= slot_tokens, "what is kept must fit"  # noqa: PT018
        shape = (2, num_slots, self._kv_heads, slot_tokens, self._head_dim)
        used = prod(shape)
        layers = [memory[:used].view(shape) for memory in self._memory]
        if num_kept:
            for old, new in zip(self._layers, layers, strict=True):  # the same memory: through a copy, one layer's
                new[:, :num_kept, :, :kept_tokens] = old[:, :num_kept, :, :kept_tokens].clone()
        self._layers, self.num_slots, self.slot_tokens = layers, num_slots, slot_tokens

    def token_index(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Where tokens at these positions of these slots (int64 [tokens]) are written; for `write_tokens`."""
        kv_heads, slot = self._kv_heads, slots.view(-1, 1, 1)
        which = torch.arange(2, device=positions.device).view(1, -1, 1)
        head = torch.arange(kv_heads, device=positions.device)
        start = ((which * self.num_slots + slot) * kv_heads + head) * self.slot_tokens
        return (start + positions.view(-1, 1, 1)).flatten()

    def write_tokens(self, layer: int, index: Tensor, kv: Tensor) -> None:
        """One token each: kv [tokens, 2 * kv_heads, head_dim], keys first."""
        self._layers[layer].view(-1, self._head_dim).index_copy_(0, index, kv.reshape(-1, self._head_dim))

    def write_prompts(self, layer: int, kv: Tensor, source: Tensor, slots: Tensor) -> None:
        """Prompts [prompts, tokens, 2, kv_heads, head_dim] into slots; slots[i] gets prompt source[i]."""
        length = min(kv.shape[1], self.slot_tokens)
        wanted = kv[:, :length].permute(2, 0, 3, 1, 4)
        if source.numel() != kv.shape[0]:
            wanted = wanted.index_select(1, source)
        self._layers[layer][:, slots, :, :length] = wanted

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv_heads, length, head_dim]; views."""
        keys, values = self._layers[layer][:, slots, :, :length]
        return keys, values

    def copy(self, source: list[int], target: list[int], length: int) -> None:
        """The first tokens of slots into other slots."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
