"""Fault: importing Megatron-Core compiles its fused functions with torch.compile, whether or not they will be used.

The import of the compiler takes a third of Megatron's own, in each rank, and a machine without a C++ compiler could not
run the result. Without a GPU no fused function is used, so there they stay plain Python. Nor are the loggers that
Megatron imports where they are installed (its own timers' and its inference engine's), half a second a rank. Imports
nothing of Megatron itself, since it must come first.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LOGGERS = ("wandb", "torch.utils.tensorboard")
"""Megatron does without them where they are not installed."""


def _as_written(function: Callable[..., object] | None = None, **_options: object) -> object:
    """The function itself; or, called with options only, the decorator that gives it."""
    return _as_written if function is None else function


def import_megatron() -> None:
    """Import Megatron-Core; does nothing where it is imported already or a GPU is present."""
    if "megatron.core" in sys.modules or torch.cuda.is_available():
        return
    compile_function = torch.compile
    torch.compile = _as_written  # type: ignore[assignment]  # of its overloads only this use matters
    try:
        with _hidden(LOGGERS):
            importlib.import_module("megatron.core.models.gpt")
    finally:
        torch.compile = compile_function


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Modules that are not imported yet cannot be."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for that
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
