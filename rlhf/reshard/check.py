"""Proof of a plan: each wanted element arrives once, and the bytes moved against the least that any plan could move.

The bound and the counts come from index sets of the two layouts (`cells.py`), not from the planner's own arithmetic.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf.reshard.cells import Cells
from rlhf.reshard.layout import Box, ParamLayout
from rlhf.reshard.plan import Move, Plan, RankPlan
from rlhf.reshard.topology import Fanout, Link


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """What a transfer means for one rank, in bytes."""

    rank: int
    received: Mapping[Link, int]
    """By link; SAME_RANK are the copies from its own source parameters."""
    sent: Mapping[Link, int]
    """By link, to other ranks."""
    bound: int
    """Bytes of the distinct elements that it wants and does not hold."""
    far_bound: int
    """Bytes that must come to it from other nodes: of distinct elements that it wants and no rank of its node holds.
    With fanout `node`: that any rank of its node wants, counted at the first of the node's ranks."""

    @property
    def moved(self) -> int:
        """Bytes that come from other ranks."""
        return self.received[Link.SAME_NODE] + self.received[Link.ACROSS_NODES]


@dataclass(frozen=True, slots=True)
class Certificate:
    """Traffic of all ranks of a transfer beside the lower bound."""

    ranks: tuple[RankTraffic, ...]
    staging_bytes: int
    """Most extra memory that any rank needs; 0 when no buckets were cut yet."""

    def bytes_by_link(self) -> dict[Link, int]:
        """Received bytes over all ranks."""
        return {link: sum(one.received[link] for one in self.ranks) for link in Link}

    @property
    def moved(self) -> int:
        """Bytes that pass between ranks."""
        return sum(one.moved for one in self.ranks)

    @property
    def bound(self) -> int:
        """The least number of bytes that must pass between ranks."""
        return sum(one.bound for one in self.ranks)

    @property
    def far_bound(self) -> int:
        """The least number of bytes that must pass between nodes, with the fanout of the plan."""
        return sum(one.far_bound for one in self.ranks)

    def bound_by_link(self) -> dict[Link, int]:
        """The bound between nodes, and what is left of the whole inside them; a rank's own copies have none."""
        return {Link.SAME_RANK: 0, Link.SAME_NODE: self.bound - self.far_bound, Link.ACROSS_NODES: self.far_bound}

    @property
    def ratio(self) -> float:
        """Moved over bound: 1.0 when nothing is sent that need not be."""
        return ratio(self.moved, self.bound)

    @property
    def far_ratio(self) -> float:
        """Bytes between nodes over their bound."""
        return ratio(self.bytes_by_link()[Link.ACROSS_NODES], self.far_bound)

    def render(self) -> str:
        """A few lines for the start of a run."""
        most_in = max(self.ranks, key=lambda one: one.moved)
        most_out = max(self.ranks, key=lambda one: sum(one.sent.values()))
        lines = [
            f"reshard certificate: {len(self.ranks)} ranks, moved {mib(self.moved)}, lower bound {mib(self.bound)}, "
            f"ratio {self.ratio:.3f}",
            *(f"  {link.value:<13} {mib(count):>14}" for link, count in self.bytes_by_link().items()),
            f"  bound across  {mib(self.far_bound):>14}  (ratio {self.far_ratio:.3f})",
            f"  most received {mib(most_in.moved):>14}  (rank {most_in.rank})",
            f"  most sent     {mib(sum(most_out.sent.values())):>14}  (rank {most_out.rank})",
            f"  peak staging  {mib(self.staging_bytes):>14}",
        ]
        return "\n".join(lines)


def ratio(moved: int, bound: int) -> float:
    """Moved over bound; 1.0 when nothing moves and nothing must."""
    if bound == 0:
        return 1.0 if moved == 0 else float("inf")
    return moved / bound


def mib(num_bytes: int) -> str:
    """Bytes as readable MiB."""
    return f"{num_bytes / 2**20:,.2f} MiB"


def certify(plan: Plan, parts: Sequence[RankPlan] = ()) -> Certificate:
    """Prove the whole plan, every rank of it, in this process.

    `parts`: those of all ranks of the plan, in their order, where the caller has them already.

    Raises:
        AssertionError: An element arrives twice or not at all, or a send has no receive: a fault of the planner.
    """
    known, parts = Known(), parts or [plan.of(rank) for rank in plan.ranks]
    assert tuple(part.rank for part in parts) == plan.ranks, "reshard: needs the parts of all ranks, in their order"
    for part in parts:
        check_arrivals(plan, part, known)
    sends = Counter(move for part in parts for move in part.sends)
    assert sends == Counter(move for part in parts for move in part.receives), "reshard: sends and receives do not pair"
    return Certificate(tuple(rank_traffic(plan, part, known) for part in parts), staging_bytes=0)


@dataclass(frozen=True, slots=True)
class Known:
    """What was found for earlier ranks of a plan and holds for ranks that hold and want the same tuples.

    Keys are ids of tuples that the plan's indices keep alive.
    """

    missing: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = field(default_factory=dict)
    """Of one tensor, by ids of (all that is wanted, all that is held)."""
    lacking: dict[tuple[tuple[Box, ...], tuple[Box, ...]], int] = field(default_factory=dict)
    """Of one tensor, by the blocks that are wanted and held: layers are alike."""
    bounds: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, int]] = field(default_factory=dict)
    """Of all tensors, by ids of (all that each wanter wants, all that each holder holds)."""
    held: set[tuple[int, Box]] = field(default_factory=set)
    """(holdings of a tensor, block inside them)."""
    crossed: set[tuple[int, str, Box]] = field(default_factory=set)
    """(rank that passes on, tensor, block): it takes the block across itself."""
    filled: set[tuple[int, tuple[Box, ...], tuple[Box, ...]]] = field(default_factory=set)
    """(wants of a tensor, blocks that arrive, places that echoes fill): each slot is filled once."""
    filled_alike: set[tuple[tuple[tuple[Box, tuple[int, ...], int], ...], tuple[Box, ...]]] = field(default_factory=set)
    """Without echoes, by the places of the wants alone: layers are alike."""


def rank_traffic(plan: Plan, part: RankPlan, known: Known | None = None) -> RankTraffic:
    """Bytes of one rank's part, and its lower bound."""
    received, sent = dict.fromkeys(Link, 0), dict.fromkeys(Link, 0)
    item = plan.src.item_bytes
    for move in (*part.copies, *part.receives):
        received[plan.topology.link(move.src_rank, part.rank)] += move.box.num_elements * item
    for move in part.sends:
        sent[plan.topology.link(part.rank, move.dst_rank)] += move.box.num_elements * item
    bound = sum(lower_bounds(plan, part.rank, known).values())
    far_bound = sum(far_bounds(plan, part.rank, known).values())
    return RankTraffic(part.rank, received, sent, bound * item, far_bound * item)


def lower_bounds(plan: Plan, rank: int, known: Known | None = None) -> dict[str, int]:
    """Distinct elements of each tensor that a rank wants and does not hold itself: from the two layouts alone."""
    return _missing(plan, [rank], [rank], known or Known())


def far_bounds(plan: Plan, rank: int, known: Known | None = None) -> dict[str, int]:
    """Distinct elements of each tensor that a rank wants and no rank of its node holds: from the layouts alone.

    With fanout `node`, those that any rank of its node wants; all counted at the first of them.
    """
    on_node = plan.on_node[plan.topology.nodes[rank]]
    if plan.fanout is Fanout.DIRECT:
        return _missing(plan, [rank], on_node, known or Known())
    return _missing(plan, on_node, on_node, known or Known()) if rank == on_node[0] else {}


def _missing(plan: Plan, wanters: Iterable[int], holders: Sequence[int], known: Known) -> dict[str, int]:
    """Distinct elements of each tensor that any of the wanters wants and none of the holders holds."""
    wanting = [of for rank in wanters if (of := plan.dst_index.of_rank(rank))]
    held = [of for rank in holders if (of := plan.src_index.of_rank(rank))]
    alike = (tuple(map(id, wanting)), tuple(map(id, held)))
    if alike in known.bounds:
        return known.bounds[alike]
    found: dict[str, int] = {}
    wanted: dict[str, dict[int, Sequence[ParamLayout]]] = {}
    for of_rank in wanting:
        for tensor, wants in of_rank.items():
            wanted.setdefault(tensor, {})[id(wants)] = wants
    for tensor, all_wants in wanted.items():
        all_holds = {id(of[tensor]): of[tensor] for of in held if tensor in of}
        key = (tuple(all_wants), tuple(all_holds))
        if key not in known.missing:
            want_boxes = tuple(one.box for wants in all_wants.values() for one in wants)
            held_boxes = tuple(one.box for holds in all_holds.values() for one in holds)
            known.missing[key] = _lacking(want_boxes, held_boxes, known)
        found[tensor] = known.missing[key]
    known.bounds[alike] = found
    return found


def _lacking(wanted: tuple[Box, ...], held: tuple[Box, ...], known: Known) -> int:
    if (key := (wanted, held)) not in known.lacking:
        cells = Cells([*wanted, *held])
        known.lacking[key] = cells.elements((cells.count(wanted) > 0) & (cells.count(held) == 0))
    return known.lacking[key]


def check_arrivals(plan: Plan, part: RankPlan, known: Known | None = None) -> None:
    """Assert that each slot of a rank's destination parameters is filled once, from a rank that holds the element."""
    known = known or Known()
    arriving: dict[str, list[Box]] = {}
    for move in (*part.copies, *part.receives):
        arriving.setdefault(move.tensor, []).append(move.box)
        if move.passed_on:
            _check_passed_on(plan, move, known)
            continue
        holds = plan.src_index.of_rank(move.src_rank).get(move.tensor, ())
        if (id(holds), move.box) not in known.held:
            inside = any(one.box.contains(move.box) for one in holds)
            assert inside, f"reshard: {move} from a rank that does not hold it"
            known.held.add((id(holds), move.box))
    echoes: dict[tuple[str, str], list[Box]] = {}
    for echo in part.echoes:
        echoes.setdefault((echo.tensor, echo.second.param), []).append(echo.second.param_box(echo.box))
    wanted = plan.dst_index.of_rank(part.rank)
    assert set(arriving) <= set(wanted), f"reshard: rank {part.rank} is sent what it does not want"
    for tensor, wants in wanted.items():
        boxes = arriving.get(tensor, [])
        places = tuple(box for one in wants for box in echoes.get((tensor, one.param), ()))
        if (key := (id(wants), tuple(boxes), places)) not in known.filled:
            alike = (_places(wants), tuple(boxes))
            if places or alike not in known.filled_alike:
                _check_tensor(tensor, wants, boxes, echoes, part.rank)
            known.filled.add(key)
            if not places:
                known.filled_alike.add(alike)


def _check_passed_on(plan: Plan, move: Move, known: Known) -> None:
    """Assert that the sender itself receives the block, from a source of another node."""
    key = (move.src_rank, move.tensor, move.box)
    if key in known.crossed:
        return
    brought = Move(move.tensor, move.box, move.origin, move.src_rank)
    assert brought in plan.into(move.src_rank, move.tensor), f"reshard: {move} is passed on by a rank that lacks it"
    assert plan.topology.link(move.origin, move.src_rank) is Link.ACROSS_NODES, f"reshard: {move} crosses no node"
    assert plan.topology.link(move.src_rank, move.dst_rank) is Link.SAME_NODE, f"reshard: {move} leaves its node"
    known.crossed.add(key)


def _check_tensor(
    tensor: str,
    wants: Sequence[ParamLayout],
    arriving: Sequence[Box],
    echoes: Mapping[tuple[str, str], Sequence[Box]],
    rank: int,
) -> None:
    cells = Cells([*_boxes(wants), *arriving])
    counted, wanted = cells.count(arriving), cells.count(_boxes(wants)) > 0
    assert (counted == wanted).all(), f"reshard: an element of {tensor} does not arrive once at rank {rank}"
    # An element lands in the first want that holds it; later wants of it must be filled by echoes, once each.
    for param in {one.param for one in wants}:
        slots = [one.param_box(one.box) for one in wants if one.param == param]
        filled = [
            one.param_box(box)
            for one in wants
            if one.param == param
            for box in arriving
            if _first_holder(wants, box) is one
        ]
        filled += echoes.get((tensor, param), [])
        inside = Cells([*slots, *filled])
        exactly = inside.count(slots)
        assert exactly.max() <= 1, f"reshard: two blocks of {tensor} share a place in {param} on rank {rank}"
        assert (inside.count(filled) == exactly).all(), f"reshard: {param} on rank {rank} is not filled once"


def _places(wants: Sequence[ParamLayout]) -> tuple[tuple[Box, tuple[int, ...], int], ...]:
    """Blocks, where they start, and which share a parameter."""
    numbers: dict[str, int] = {}
    return tuple((one.box, one.param_start, numbers.setdefault(one.param, len(numbers))) for one in wants)


def _first_holder(wants: Sequence[ParamLayout], box: Box) -> ParamLayout:
    return next(one for one in wants if one.box.contains(box))


def _boxes(held: Iterable[ParamLayout]) -> list[Box]:
    return [one.box for one in held]
