"""A sink that goes through a transfer to its end even when the engine behind it is lost on the way."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from rlhf.errors import EngineLostError
from rlhf.reshard.checksum import Place
from rlhf.reshard.windows import NUM_REGIONS, Manifest
from rlhf.rollout.sglang.weights.sink import SchedulerSink

T = TypeVar("T")


class LastingSink:
    """A `WindowSink` for engines that are replaced when they are lost.

    What still comes then goes into memory that nobody reads, and from there on to other ranks as planned: no other rank
    of the transfer waits for what this one does not do any more.
    """

    def __init__(self, sink: SchedulerSink) -> None:
        self._sink = sink
        self._spare: tuple[Tensor, ...] = ()
        self._room: tuple[int, str] = (0, "")
        self.is_lost = False
        self.cause: EngineLostError | None = None

    @property
    def needs_complete(self) -> bool:
        """See `WindowSink.needs_complete`."""
        return self.is_lost or self._sink.needs_complete

    def begin(self, manifest: Manifest, dtype: str) -> None:
        """See `WindowSink.begin`."""
        self._room = (manifest.region_elements, dtype)
        self._go(lambda: self._sink.begin(manifest, dtype))

    def region(self, number: int) -> Tensor:
        """See `WindowSink.region`."""
        found = self._go(lambda: self._sink.region(number))
        if found is not None:
            return found
        self._spare = self._spare or self._sink.spare(*self._room)
        return self._spare[number % NUM_REGIONS]

    def hand_over(self, number: int) -> None:
        """See `WindowSink.hand_over`."""
        self._go(lambda: self._sink.hand_over(number))

    def finish(self) -> None:
        """See `WindowSink.finish`."""
        self._go(self._sink.finish)

    def sums(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """See `WindowSink.sums`; of a lost engine zeros."""
        found = self._go(lambda: self._sink.sums(places, brief=brief))
        return [0] * len(places) if found is None else found

    def end(self) -> None:
        """See `WindowSink.end`."""
        self._go(self._sink.end)

    def _go(self, step: Callable[[], T]) -> T | None:
        """A step of the transfer; None and nothing once the engine is lost."""
        if self.is_lost:
            return None
        try:
            return step()
        except EngineLostError as error:
            self.is_lost, self.cause = True, error
            told = self._sink.give_up()
            if isinstance(told, EngineLostError):
                self.cause = told
            return None
