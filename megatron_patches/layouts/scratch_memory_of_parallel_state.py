"""Fault: under sequence parallelism linear layers take their scratch memory from the global parallel state."""

from megatron.core.utils import GlobalMemoryBuffer

from megatron_patches.patch import Patch

_SCRATCH = GlobalMemoryBuffer()
"""One for all models: each use of it ends before the next layer's begins, as upstream."""


def _scratch() -> GlobalMemoryBuffer:
    return _SCRATCH


PATCH = Patch(
    target="megatron.core.tensor_parallel.layers:get_global_memory_buffer",
    source_sha="77b942465509",
    replacement=_scratch,
    why="asserts that the global parallel state was initialised, for a buffer that no layout has a part in",
    drop_when="the buffer is made on first use, or handed in",
)
