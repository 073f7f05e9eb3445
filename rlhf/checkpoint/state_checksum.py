"""Checksums of a model's stored tensors, the same whatever ranks and layout they lie in."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateChecksum:
    """Of every stored tensor: weights, moments and masters by their stored names."""

    sums: Mapping[str, int]
    """By stored tensor: `rlhf.reshard.checksum` of all its elements, signed 64 bits."""
    num_bytes: int
    """Of all elements."""

    @property
    def combined(self) -> int:
        """One number of all tensors, unsigned 64 bits."""
        lines = "".join(f"{key} {number}\n" for key, number in sorted(self.sums.items()))
        return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=8).digest(), "big")

    def render(self) -> str:
        """Short line for the console: two states are equal when their lines are."""
        return f"{len(self.sums)} tensors, {self.num_bytes / 1e9:.3f} GB, checksum {self.combined:016x}"
