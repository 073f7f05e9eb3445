"""Holds a function of `faulty` under a name of its own, as `from module import function` does."""

from tests.megatron_patches.faulty import shifted

__all__ = ["shifted"]
