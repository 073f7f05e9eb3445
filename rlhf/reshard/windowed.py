"""One rank's blocks on their way through windows: received into regions, passed on from there, handed over."""

from collections.abc import Sequence

from torch import Tensor

from rlhf.reshard.bucket import Bucket, Message
from rlhf.reshard.execute import Source
from rlhf.reshard.layout import Box
from rlhf.reshard.plan import Move
from rlhf.reshard.windows import NUM_REGIONS, Window, WindowSink


class Windowed:
    """A `Destination` that hands windows to a `WindowSink`. Made for one transfer, after the sink's `begin`."""

    keeps = False

    def __init__(
        self,
        windows: Sequence[Window],
        receives: Sequence[Message],
        sends: Sequence[Message],
        src: Source,
        sink: WindowSink,
    ) -> None:
        self._windows, self._src, self._sink = windows, src, sink
        self._at: dict[tuple[str, Box], tuple[int, int]] = {
            (piece.move.tensor, piece.move.box): (window.number, piece.at)
            for window in windows
            for piece in window.pieces
        }
        self._coming = [0] * len(windows)
        for message in receives:
            self._coming[message.key[0]] += 1
        self._passing = [0] * len(windows)
        for message in sends:
            if message.passed_on:
                self._passing[message.key[0]] += 1
        self._regions: list[Tensor] = []
        self._num_owned, self._num_handed, self._num_passed = 0, 0, 0
        self._count_passed()

    def admits(self, bucket: Bucket) -> bool:
        """See `Destination.admits`: a region must be free for its window."""
        self.own()
        return all(self._is_free(message.key[0]) for message in bucket.receives)

    def room(self, message: Message) -> Tensor:
        """See `Destination.room`: always in a region."""
        self.own()  # windows in between, into which nothing is sent
        first = message.moves[0]
        number, at = self._at[first.tensor, first.box]
        return self._region(number)[at : at + message.num_elements]

    def arrived(self, message: Message, data: Tensor) -> None:
        """See `Destination.arrived`: it lies where it should."""
        self._coming[message.key[0]] -= 1
        self._hand_over()

    def held(self, move: Move) -> Tensor:
        """See `Destination.held`: in the region, which is kept until all of it was passed on."""
        number, at = self._at[move.tensor, move.box]
        return self._region(number)[at : at + move.box.num_elements].view(move.box.shape)

    def passed(self, message: Message) -> None:
        """See `Destination.passed`."""
        self._passing[message.key[0]] -= 1
        self._count_passed()

    def own(self) -> None:
        """See `Destination.own`."""
        while self._num_owned < len(self._windows) and self._is_free(self._num_owned):
            window = self._windows[self._num_owned]
            region = self._region(window.number)
            for piece in window.pieces:
                move = piece.move
                if move.src_rank == move.dst_rank:
                    flat = region[piece.at : piece.at + move.box.num_elements]
                    flat.view(move.box.shape).copy_(self._src.view(move.tensor, move.box))
            self._num_owned += 1
            self._hand_over()

    def finish(self) -> None:
        """See `Destination.finish`."""
        self.own()
        assert self._num_handed == len(self._windows), "reshard: a window was never whole"
        self._sink.finish()

    def _is_free(self, number: int) -> bool:
        """Whether the window before it in its region was handed over, and passed on to whom it may concern."""
        return number - NUM_REGIONS < min(self._num_handed, self._num_passed)

    def _count_passed(self) -> None:
        while self._num_passed < len(self._passing) and not self._passing[self._num_passed]:
            self._num_passed += 1

    def _region(self, number: int) -> Tensor:
        while len(self._regions) <= number:
            assert self._is_free(len(self._regions)), "reshard: no region for a window"
            self._regions.append(self._sink.region(len(self._regions)))
        return self._regions[number]

    def _hand_over(self) -> None:
        while self._num_handed < self._num_owned and not self._coming[self._num_handed]:
            self._sink.hand_over(self._num_handed)
            self._num_handed += 1
