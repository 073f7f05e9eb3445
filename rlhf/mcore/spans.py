"""What Megatron-Core times inside itself, as spans: pass an instance as the `timers` of its configs."""

from contextlib import AbstractContextManager

from rlhf.metrics.timers import Kind, SpanFn

WAITS = ("-recv", "-send", "-sync", "-all-reduce", "-all-gather")
"""Parts of Megatron's names of what it does together with other ranks."""


class MegatronSpans:
    """Stands in for `megatron.core.Timers`: microbatches forward and backward, pipeline messages, gradient reduction.

    On a GPU they show when the host gave out the work, since kernels run later.
    """

    def __init__(self, span: SpanFn) -> None:
        self._span = span
        self._open: dict[str, _Pair] = {}

    def __call__(self, name: str, log_level: int = 0) -> "_Pair":
        """The timer of a name; Megatron says `timers(name).start()`, later `timers(name).stop()`."""
        del log_level
        return self._open.setdefault(name, _Pair(self._span, name))


class _Pair:
    """Start and stop as a context that is entered and left."""

    def __init__(self, span: SpanFn, name: str) -> None:
        kind = Kind.WAIT if any(part in name for part in WAITS) else Kind.WORK
        self._span, self._name, self._kind = span, name.removesuffix("-compute"), kind
        self._context: AbstractContextManager[None] | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin; a barrier would change what is measured and is left out."""
        del barrier
        self._context = self._span(self._name, self._kind)
        self._context.__enter__()

    def stop(self, barrier: bool = False) -> None:
        """End."""
        del barrier
        assert self._context is not None, f"{self._name}: stopped before it was started"
        self._context.__exit__(None, None, None)
        self._context = None
