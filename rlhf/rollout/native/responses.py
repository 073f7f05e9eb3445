"""Tokens that running rows have sampled, as they come, on the device."""

import torch
from torch import Tensor


class Responses:
    """One line of `max_new_tokens` numbers for each slot; what is beyond a row's last token means nothing."""

    def __init__(self, num_slots: int, max_new_tokens: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, max_new_tokens, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_slots, max_new_tokens, dtype=torch.float32, device=device)

    def add(self, places: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """The next token of the rows in the first slots, at their places in the response (int64 [rows])."""
        slots = torch.arange(places.numel(), device=places.device)
        self._tokens[slots, places] = tokens
        self._logprobs[slots, places] = logprobs

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slots onto others."""
        self._tokens[target] = self._tokens[source]
        self._logprobs[target] = self._logprobs[source]

    def keep(self, num_rows: int, num_slots: int) -> None:
        """Make it `num_slots` slots, the first `num_rows` of which stay."""
        for name in ("_tokens", "_logprobs"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(num_slots, old.shape[1])
            new[:num_rows] = old[:num_rows]
            setattr(self, name, new)

    def read(self, slots: list[int], ranges: list[range]) -> list[tuple[Tensor, Tensor]]:
        """Tokens and log-probs of slots at these places, on the CPU."""
        widest = max((places.stop for places in ranges), default=0)
        tokens, logprobs = self._tokens[slots, :widest].cpu(), self._logprobs[slots, :widest].cpu()
        return [
            (tokens[i, places.start : places.stop].clone(), logprobs[i, places.start : places.stop].clone())
            for i, places in enumerate(ranges)
        ]
