"""Which classes a pickle of Megatron-LM may name: what its arguments and random states hold, none of which runs code.

For torch's weights_only reader, which builds nothing else but plain values and tensors.
"""

import argparse
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals


class StandIn:
    """A value of a class that is not built: Megatron's enums and layouts, arrays of random states."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        self.state = state


_MEGATRON = (
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.ModelType",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
)
_ARRAYS = tuple(
    f"{package}{name}"
    for name in ("multiarray._reconstruct", "multiarray.scalar")
    for package in ("numpy.core.", "numpy._core.")
)
_OTHERS = ("numpy.ndarray", "numpy.dtype", "signal.Signals", "pathlib.PosixPath", "pathlib._local.PosixPath")
ADMITTED: tuple[Any, ...] = (
    argparse.Namespace,
    io.BytesIO,
    *((StandIn, name) for name in (*_MEGATRON, *_ARRAYS, *_OTHERS)),
)
"""What a file may hold beside plain values and tensors. The first two are what they are, the rest becomes StandIns."""


@contextmanager
def only_admitted() -> Iterator[None]:
    """What torch's reader admits: what this file names, and not what other libraries added to its list."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(list(ADMITTED))
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)
