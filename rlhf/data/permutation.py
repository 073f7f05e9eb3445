"""Shuffled order without a table: where any element of a permutation lies is computed from a key."""

import hashlib

ROUNDS = 4
"""A Feistel network of 4 rounds over a random function is a strong pseudorandom permutation (Luby, Rackoff 1988)."""


def stable_hash(*parts: object) -> int:
    """64-bit hash of the parts' printed form, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(index: int, size: int, key: int) -> int:
    """Image of index under a permutation of 0 .. size-1 that the key chooses; O(1) time and memory.

    A Feistel network permutes the smallest even-bit square that holds size; what lands outside is sent through again.
    """
    assert 0 <= index < size, f"index {index} of {size}"
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (stable_hash(key, turn, right) & mask)
        index = left << half | right
        if index < size:
            return index
