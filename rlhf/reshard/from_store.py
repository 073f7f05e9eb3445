"""Weights at rest into destination parameters: the same windows, checks and sums as a weight sync, without a group.

The source is a store that gives any block of any tensor when asked, such as a folder's files. Each destination rank
is planned as if it held the whole model itself; so every block is a copy from the rank to itself, and nothing travels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from rlhf.errors import LayoutError, WeightSyncError
from rlhf.reshard.checksum import checksum, wrapped
from rlhf.reshard.endpoint import endpoint
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import make_plan
from rlhf.reshard.routes import Routes
from rlhf.reshard.topology import Topology
from rlhf.reshard.windows import WindowSink

ReadFn = Callable[[str, Box], Tensor]
"""Gives a block of a logical tensor, in the dtype of the destination's layout; fresh memory, or a view."""

DEFAULT_WINDOW_BYTES = 64 * 2**20
"""Two regions of half as much each, and one block of an eighth, are what a destination behind a sink needs."""


class _Stored:
    """A store in the place of a rank's source parameters; sums what it gives."""

    def __init__(self, read: ReadFn, dtype: torch.dtype) -> None:
        self._read, self._dtype = read, dtype
        self.given: dict[str, int] = {}
        """Checksum of all that was given, by tensor."""

    def view(self, tensor: str, box: Box) -> Tensor:
        """See `LocalParams.view`."""
        block = self._read(tensor, box)
        if block.dtype is not self._dtype:
            raise LayoutError(
                f"weights at rest: {tensor} comes as {block.dtype}; needs {self._dtype}, as the destination's layout "
                "says; cast it when it is read"
            )
        self.given[tensor] = wrapped(self.given.get(tensor, 0) + checksum(tensor, box, block))
        return block


class _Rank:
    """One destination rank's part."""

    def __init__(
        self, layout: ModelLayout, rank: int, given: Mapping[str, Tensor] | WindowSink, read: ReadFn, window_bytes: int
    ) -> None:
        self._rank = rank
        plan = make_plan(_whole_everywhere(layout), layout, Topology((0,) * (max(layout.ranks) + 1)))
        self._routes = Routes(plan, rank, window_bytes, windowed=not isinstance(given, Mapping))
        self._endpoint = endpoint(self._routes, rank, given)
        self._source = _Stored(read, getattr(torch, layout.dtype))

    def begin(self) -> None:
        self._endpoint.begin(self._routes.route())

    def fill(self) -> None:
        with torch.no_grad():
            self._endpoint.into(self._routes.route(), self._source, torch.device("cpu")).finish()
        tensors = sorted(self._source.given)
        whole = self._routes.plan.dst.tensors
        places = [(name, Box.of(*((0, extent) for extent in whole[name]))) for name in tensors]
        held = self._endpoint.sums(places, brief=False)
        for name, found in zip(tensors, held, strict=True):
            if wrapped(found - self._source.given[name]):
                raise WeightSyncError(
                    f"weights at rest: rank {self._rank} does not hold the {name} that it was given; needs equal "
                    "checksums; load again, and look at the memory of this machine if it stays so"
                )

    def end(self) -> None:
        self._endpoint.end()


def fill(
    layout: ModelLayout,
    destinations: Mapping[int, Mapping[str, Tensor] | WindowSink],
    read: ReadFn,
    *,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
) -> None:
    """Fill the parameters of some destination ranks of a layout, or those behind their sinks. Local.

    Every element that a rank wants is read once and compared by checksums at the end. Beside the parameters this takes
    the windows, and memory for one block: of a destination in this process, as large as its largest parameter.

    Args:
        layout: Of the destination.
        destinations: By rank, its parameters or its sink. Of sinks whose processes work in step, as those of one
            engine, the leader's first: it is opened first and closed last.
        read: The store.
        window_bytes: Size of the windows' regions together.

    Raises:
        LayoutError: Parameters or blocks do not fit the layout.
        WeightSyncError: A destination refuses what comes, or does not hold it afterwards.
        EngineError: The process behind a sink is gone.
    """
    ranks = [_Rank(layout, rank, given, read, window_bytes) for rank, given in destinations.items()]
    try:
        _begin(ranks)
        for one in ranks:
            one.fill()
    finally:
        for one in reversed(ranks):
            one.end()


def _begin(ranks: Sequence[_Rank]) -> None:
    """Open all, also where one refuses: processes that work in step all wait until they are opened and closed."""
    refusals = []
    for one in ranks:
        try:
            one.begin()
        except WeightSyncError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _whole_everywhere(layout: ModelLayout) -> ModelLayout:
    """The layout of a source that holds every tensor whole on every destination rank."""

    @cache
    def whole() -> tuple[ParamLayout, ...]:
        return tuple(
            ParamLayout(name, Box(tuple((0, extent) for extent in shape)), name, (0,) * len(shape))
            for name, shape in layout.tensors.items()
        )

    return ModelLayout(layout.tensors, layout.dtype, layout.ranks, lambda _: whole())
