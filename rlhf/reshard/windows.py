"""A destination whose parameters another process holds: its blocks pass through a stream of windows.

A window is a flat piece of memory that both processes see. Sources send straight into it; when it is whole, the other
process copies it into its parameters, while the next one is received into a second region. Which block lies where in
which window follows from the plan alone, so both ends of every message come to it without talking.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from rlhf.reshard.bucket import ALONE_BYTES, Message, split
from rlhf.reshard.checksum import Place
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
    and when it is gone EngineLostError; a sink may also go along to the end without it, and say `is_lost`.
    """

    @property
    def is_lost(self) -> bool:
        """The other process is gone, and what came into the windows is lost."""

    @property
    def needs_complete(self) -> bool:
        """The other process does not hold the weights of an earlier transfer: the next one must bring all."""

    def begin(self, manifest: Manifest, dtype: str) -> None:
        """A transfer of elements of this dtype starts: the other process compares the manifest with what it holds."""

    def region(self, number: int) -> Tensor:
        """Flat memory for window `number`; blocks until window number - NUM_REGIONS is loaded."""

    def hand_over(self, number: int) -> None:
        """Window `number` is whole: load it. Numbers go up by one."""

    def finish(self) -> None:
        """All windows were handed over; blocks until they are loaded and the other process finds nothing missing."""

    def sums(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """Checksum of what the rank holds inside each place, taken by the other process; see `sums_in`."""

    def end(self) -> None:
        """The transfer is over, well or not: the other process goes back to its own work."""


class Windows:
    """The windows of all destination ranks of a plan, worked out rank by rank when asked."""

    def __init__(self, plan: Plan, window_bytes: int, tensors: Collection[str] | None = None) -> None:
        """`tensors`: those that are transferred; None: all."""
        self._plan, self._tensors = plan, tensors
        self._pool = frozenset(plan.dst.ranks)
        self.max_elements = max(1, window_bytes // plan.src.item_bytes)
        """Of a window."""
        self._alone = ALONE_BYTES // plan.src.item_bytes
        self._place = {rank: at for at, rank in enumerate(plan.ranks)}
        self._found: dict[int, tuple[Window, ...]] = {}

    def of(self, dst_rank: int) -> tuple[Window, ...]:
        """One rank's windows; all sources of the rank send into the first one.

        With fanout `node` all ranks of a node have as many, some of them maybe empty, and what one passes on to another
        passes through windows of the same number at both: it is passed on while it lies there.
        """
        if dst_rank not in self._found:
            ranks: tuple[int, ...] = (dst_rank,)
            if self._plan.fanout is Fanout.NODE:
                here = self._plan.on_node[self._plan.topology.nodes[dst_rank]]
                ranks = tuple(rank for rank in here if rank in self._pool)
            self._found |= self._cut(ranks)
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

    def _moves(self, dst_rank: int) -> list[Move]:
        return [
            found
            for tensor in self._plan.dst_index.of_rank(dst_rank)
            if self._tensors is None or tensor in self._tensors
            for found in self._plan.into(dst_rank, tensor)
            if isinstance(found, Move)
        ]

    def _cut(self, ranks: Sequence[int]) -> dict[int, tuple[Window, ...]]:
        """Every source's blocks, in the order of the model, are spread evenly over the windows.

        A block that several of the ranks want lies in the same window at each.
        """
        most = max(1, self.max_elements // PIECES_A_WINDOW)
        blocks: dict[int, dict[tuple[str, Box], list[Move]]] = {}
        for move in (move for rank in ranks for move in self._moves(rank)):
            of_source = blocks.setdefault(move.origin if move.passed_on else move.src_rank, {})
            for part in _parts(move, most):
                of_source.setdefault((part.tensor, part.box), []).append(part)
        sums = {src: sum(box.num_elements for _, box in of) for src, of in blocks.items()}
        steps = max(1, sum(sums.values()) // most)
        placed: list[tuple[int, int, int, list[Move]]] = []
        for src, of in blocks.items():
            turn, before = self._turn(src, ranks[0]), 0
            for at, (tensor, box) in enumerate(sorted(of, key=lambda key: (self._plan.order[key[0]], key[1].spans))):
                placed.append((before * steps // sums[src], turn, at, of[tensor, box]))
                before += box.num_elements
        placed.sort(key=lambda entry: entry[:3])
        return self._fill(ranks, [moves for *_, moves in placed])

    def _fill(self, ranks: Sequence[int], blocks: Sequence[Sequence[Move]]) -> dict[int, tuple[Window, ...]]:
        """Windows of the ranks: as many blocks as fit at all ranks that want them, then the next for all."""
        found: dict[int, list[Window]] = {rank: [] for rank in ranks}
        now: dict[int, list[Move]] = {rank: [] for rank in ranks}
        filled = dict.fromkeys(ranks, 0)

        def close() -> None:
            for rank in ranks:
                found[rank].append(self._window(len(found[rank]), now[rank]))
                now[rank], filled[rank] = [], 0

        for moves in blocks:
            size = moves[0].box.num_elements
            if any(filled[move.dst_rank] and filled[move.dst_rank] + size > self.max_elements for move in moves):
                close()
            for move in moves:
                now[move.dst_rank].append(move)
                filled[move.dst_rank] += size
        if any(filled.values()):
            close()
        return {rank: tuple(windows) for rank, windows in found.items()}

    def _window(self, number: int, moves: Sequence[Move]) -> Window:
        placed, at = [], 0
        # What comes in one message must lie together; the sort is stable.
        for move in sorted(moves, key=lambda one: (self._turn(one.src_rank, one.dst_rank), one.passed_on)):
            placed.append(Piece(move, at))
            at += move.box.num_elements
        return Window(number, tuple(placed), at)

    def _turn(self, src: int, dst: int) -> int:
        """Ranks take turns as each other's peers; a rank comes first with what it gives to itself."""
        return (self._place[dst] - self._place[src]) % len(self._place)

    def _between(self, src_rank: int, dst_rank: int) -> Iterator[Message]:
        """A source's pieces in each window, joined; a large one alone, so that it need not be packed."""
        turn, number = self._turn(src_rank, dst_rank), 0
        for window in self.of(dst_rank):
            moves = [piece.move for piece in window.pieces if piece.move.src_rank == src_rank]
            for passed_on in (False, True):
                # Behind all that comes from afar into windows of this number.
                after = turn + len(self._place) * passed_on
                for joined in self._joined([move for move in moves if move.passed_on == passed_on]):
                    size = sum(move.box.num_elements for move in joined)
                    yield Message(src_rank, dst_rank, joined, size, (window.number, after, src_rank, passed_on, number))
                    number += 1

    def _joined(self, moves: Sequence[Move]) -> Iterator[tuple[Move, ...]]:
        now: list[Move] = []
        for move in moves:
            is_large = move.box.num_elements >= self._alone
            if now and is_large:
                yield tuple(now)
                now = []
            if is_large:
                yield (move,)
            else:
                now.append(move)
        if now:
            yield tuple(now)


def _parts(move: Move, most: int) -> Iterator[Move]:
    if move.box.num_elements <= most:
        yield move
    else:
        yield from (replace(move, box=box) for box in split(move.box, most))
