"""How this process's allocator treats memory that torch gives back on the host."""

import ctypes

KEPT_PIECE_BYTES = 32 * 2**20
"""Largest piece that is kept for the next tensor; glibc allows no more. Larger ones still go back to the system."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's names for the three settings, from malloc.h."""


def keep_freed_memory() -> bool:
    """Keep freed activations for the next pass instead of handing them to the system, if the C library is glibc.

    Memory that comes from the system is zeroed page by page at its first touch, which takes longer than most of the
    operations that fill it: training a small model on a CPU is a tenth faster without. Says whether it was done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, KEPT_PIECE_BYTES), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
    return all([mallopt(name, value) == 1 for name, value in settings])
