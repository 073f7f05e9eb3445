"""A destination whose parameters another process holds: its blocks pass through a stream of windows.

A window is a flat piece of memory that both processes see. Sources send straight into it; when it is whole, the other
process copies it into its parameters, while the next one is received into a second region. Which block lies where in
which window follows from the plan alone, so both ends of every message come to it without talking.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from rlhf.errors import LayoutError
from rlhf.reshard.bucket import ALONE_BYTES, Bucket, Message, split
from rlhf.reshard.checksum import Place
from rlhf.reshard.execute import LocalParams
from rlhf.reshard.layout import Box, ParamLayout
from rlhf.reshard.plan import Echo, Move, Plan, RankPlan
from rlhf.reshard.topology import Fanout

NUM_REGIONS = 2
"""One is received into while the other is loaded."""

PIECES_A_WINDOW = 4
"""A block is cut to at most this share of a window, so that windows get nearly full; and sources take turns at it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block in a window, packed with its last dim innermost."""

    move: Move
    at: int
    """Its first element, counted from the start of the window."""


@dataclass(frozen=True, slots=True)
class Window:
    """What passes through a region at one time; the pieces of one source lie together."""

    number: int
    pieces: tuple[Piece, ...]
    num_elements: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the process that holds a rank's parameters must know of one transfer."""

    held: tuple[ParamLayout, ...]
    """All that the rank holds, transferred or not."""
    windows: tuple[Window, ...]
    echoes: tuple[Echo, ...]
    """Copied from parameter to parameter at the end."""
    complete: bool
    """Whether every held element must come, so that one that does not is an error."""

    @property
    def region_elements(self) -> int:
        """Elements of the largest window."""
        return max((window.num_elements for window in self.windows), default=0)


class WindowSink(Protocol):
    """One destination rank's door to the process that holds its parameters. Made for one layout; used for many syncs.

    Calls block only for that process, never for another rank. Each raises WeightSyncError when that process refuses,
    EngineError when it is gone.
    """

    needs_complete: bool
    """The other process does not hold the weights of an earlier transfer: the next one must bring all."""

    def begin(self, manifest: Manifest, dtype: str) -> None:
        """A transfer of elements of this dtype starts: the other process compares the manifest with what it holds."""

    def region(self, number: int) -> Tensor:
        """Flat memory for window `number`; blocks until window number - NUM_REGIONS is loaded."""

    def hand_over(self, number: int) -> None:
        """Window `number` is whole: load it. Numbers go up by one."""

    def finish(self) -> None:
        """All windows were handed over; blocks until they are loaded and the other process finds nothing missing."""

    def sums(self, places: Sequence[Place]) -> Sequence[int]:
        """Checksum of what the rank holds inside each place, taken by the other process; see `sums_in`."""

    def end(self) -> None:
        """The transfer is over, well or not: the other process goes back to its own work."""


class Windows:
    """The windows of all destination ranks of a plan, worked out rank by rank when asked."""

    def __init__(self, plan: Plan, window_bytes: int, tensors: Collection[str] | None = None) -> None:
        """`tensors`: those that are transferred; None: all."""
        check_direct(plan.fanout)
        self._plan, self._tensors = plan, tensors
        self._max = max(1, window_bytes // plan.src.item_bytes)
        self._alone = ALONE_BYTES // plan.src.item_bytes
        self._place = {rank: at for at, rank in enumerate(plan.ranks)}
        self._found: dict[int, tuple[Window, ...]] = {}

    def of(self, dst_rank: int) -> tuple[Window, ...]:
        """One rank's windows; all sources of the rank send into the first one."""
        if dst_rank not in self._found:
            moves = [
                found
                for tensor in self._plan.dst_index.of_rank(dst_rank)
                if self._tensors is None or tensor in self._tensors
                for found in self._plan.into(dst_rank, tensor)
                if isinstance(found, Move)
            ]
            self._found[dst_rank] = tuple(self._cut(moves))
        return self._found[dst_rank]

    def messages(self, part: RankPlan) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """One rank's (receives, sends), each in the order of the job: by number of the destination's window."""
        sources = sorted({move.src_rank for move in part.receives})
        takers = sorted({move.dst_rank for move in part.sends})
        receives = [one for source in sources for one in self._between(source, part.rank)]
        sends = [one for taker in takers for one in self._between(part.rank, taker)]
        for messages, moves in ((receives, part.receives), (sends, part.sends)):
            assert sum(m.num_elements for m in messages) == sum(m.box.num_elements for m in moves)
        return tuple(sorted(receives, key=lambda m: m.key)), tuple(sorted(sends, key=lambda m: m.key))

    def buckets(self, receives: Sequence[Message], sends: Sequence[Message]) -> tuple[Bucket, ...]:
        """Cut one rank's messages into buckets: one window each, and no more to send than a window holds."""
        incoming, buckets = {id(message) for message in receives}, []
        now: list[Message] = []
        filled = 0
        for message in sorted((*receives, *sends), key=lambda m: m.key):
            more = 0 if id(message) in incoming else message.num_elements
            if now and (message.key[0] != now[0].key[0] or filled + more > self._max):
                buckets.append(_bucket(now, incoming))
                now, filled = [], 0
            now.append(message)
            filled += more
        return (*buckets, _bucket(now, incoming)) if now else tuple(buckets)

    def _cut(self, moves: Sequence[Move]) -> Iterator[Window]:
        """Every source's moves, in the order of the model, are spread evenly over the windows."""
        most = max(1, self._max // PIECES_A_WINDOW)
        of_source: dict[int, list[_Sized]] = {}
        for move in sorted(moves, key=lambda m: (self._plan.order[m.tensor], m.box.spans)):
            of_source.setdefault(move.src_rank, []).extend(_parts(move, most))
        sums = {src: sum(size for _, size in parts) for src, parts in of_source.items()}
        steps = max(1, sum(sums.values()) // most)
        placed: list[tuple[int, int, int, _Sized]] = []
        for src, parts in of_source.items():
            turn, before = self._turn(src, moves[0].dst_rank), 0
            for at, part in enumerate(parts):
                placed.append((before * steps // sums[src], turn, at, part))
                before += part[1]
        placed.sort(key=lambda entry: entry[:3])
        now: list[_Sized] = []
        number, filled = 0, 0
        for _, _, _, part in placed:
            if now and filled + part[1] > self._max:
                yield self._window(number, now)
                now, number, filled = [], number + 1, 0
            now.append(part)
            filled += part[1]
        if now:
            yield self._window(number, now)

    def _window(self, number: int, parts: Sequence["_Sized"]) -> Window:
        placed, at = [], 0
        for move, size in sorted(parts, key=lambda part: self._turn(part[0].src_rank, part[0].dst_rank)):  # stable
            placed.append(Piece(move, at))
            at += size
        return Window(number, tuple(placed), at)

    def _turn(self, src: int, dst: int) -> int:
        """Ranks take turns as each other's peers; a rank comes first with what it gives to itself."""
        return (self._place[dst] - self._place[src]) % len(self._place)

    def _between(self, src_rank: int, dst_rank: int) -> Iterator[Message]:
        """A source's pieces in each window, joined; a large one alone, so that it need not be packed."""
        turn, number = self._turn(src_rank, dst_rank), 0
        for window in self.of(dst_rank):
            joined: list[tuple[list[Move], int]] = []
            is_open = False
            for move in (piece.move for piece in window.pieces if piece.move.src_rank == src_rank):
                size = move.box.num_elements
                is_large = size >= self._alone
                if is_open and not is_large:
                    moves, filled = joined.pop()
                    joined.append(([*moves, move], filled + size))
                else:
                    joined.append(([move], size))
                is_open = not is_large
            for moves, filled in joined:
                yield Message(src_rank, dst_rank, tuple(moves), filled, (window.number, turn, src_rank, False, number))
                number += 1


class Windowed:
    """A `Destination` that hands windows to a `WindowSink`. Made for one transfer, after the sink's `begin`."""

    def __init__(
        self, windows: Sequence[Window], receives: Sequence[Message], src: LocalParams, sink: WindowSink
    ) -> None:
        self._windows, self._src, self._sink = windows, src, sink
        self._at: dict[tuple[str, Box], int] = {
            (piece.move.tensor, piece.move.box): piece.at for window in windows for piece in window.pieces
        }
        self._coming = [0] * len(windows)
        for message in receives:
            self._coming[message.key[0]] += 1
        self._regions: list[Tensor] = []
        self._num_owned, self._num_handed = 0, 0

    def admits(self, bucket: Bucket) -> bool:
        """See `Destination.admits`: the window before last must have been handed over."""
        self.own()
        return all(message.key[0] - NUM_REGIONS < self._num_handed for message in bucket.receives)

    def room(self, message: Message) -> Tensor:
        """See `Destination.room`: always in a region."""
        first = message.moves[0]
        at = self._at[first.tensor, first.box]
        return self._region(message.key[0])[at : at + message.num_elements]

    def arrived(self, message: Message, data: Tensor) -> None:
        """See `Destination.arrived`: it lies where it should."""
        self._coming[message.key[0]] -= 1
        self._hand_over()

    def held(self, move: Move) -> Tensor:
        """See `Destination.held`: `Windows` refuses such plans."""
        raise AssertionError("reshard: what was handed over cannot be passed on")

    def own(self) -> None:
        """See `Destination.own`."""
        while self._num_owned < len(self._windows) and self._num_owned - NUM_REGIONS < self._num_handed:
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

    def _region(self, number: int) -> Tensor:
        while len(self._regions) <= number:
            assert len(self._regions) - NUM_REGIONS < self._num_handed, "reshard: no region for a window"
            self._regions.append(self._sink.region(len(self._regions)))
        return self._regions[number]

    def _hand_over(self) -> None:
        while self._num_handed < self._num_owned and not self._coming[self._num_handed]:
            self._sink.hand_over(self._num_handed)
            self._num_handed += 1


_Sized = tuple[Move, int]
"""A move with its number of elements."""


def _parts(move: Move, most: int) -> list[_Sized]:
    size = move.box.num_elements
    if size <= most:
        return [(move, size)]
    return [(replace(move, box=box), box.num_elements) for box in split(move.box, most)]


def check_direct(fanout: Fanout) -> None:
    """Raise LayoutError for a fanout by which ranks pass on what they have handed to another process."""
    if fanout is not Fanout.DIRECT:
        raise LayoutError(
            f"reshard: fanout {fanout.value} for engines in processes of their own; needs direct, since what was "
            "handed to such a process cannot be passed on; set sync.fanout=direct"
        )


def _bucket(messages: Sequence[Message], incoming: set[int]) -> Bucket:
    return Bucket(
        receives=tuple(message for message in messages if id(message) in incoming),
        sends=tuple(message for message in messages if id(message) not in incoming),
    )
