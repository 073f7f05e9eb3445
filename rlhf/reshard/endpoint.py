"""Where a rank's destination parameters are: in this process, or behind a sink in another."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf.errors import LayoutError
from rlhf.reshard.checksum import Place, Weighted, sums_in, twice
from rlhf.reshard.execute import Destination, LocalParams, Params, Source
from rlhf.reshard.routes import Route, Routes
from rlhf.reshard.windowed import Windowed
from rlhf.reshard.windows import Manifest, WindowSink


class Endpoint(Protocol):
    """One rank's destination of one transfer."""

    @property
    def needs_complete(self) -> bool:
        """It may have lost the weights of earlier transfers."""

    @property
    def is_lost(self) -> bool:
        """What comes in goes nowhere."""

    def begin(self, route: Route) -> None:
        """The transfer starts."""

    def into(self, route: Route, src: Source, device: torch.device) -> Destination:
        """What takes the blocks."""

    def sums(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """Checksum of what the rank holds inside each place, after the transfer; see `sums_in`."""

    def end(self) -> None:
        """The transfer is over, well or not."""


class InPlace:
    """An `Endpoint`: parameters of this process; none on a rank outside the destination's pool."""

    needs_complete = False
    is_lost = False

    def __init__(self, routes: Routes, rank: int, params: Mapping[str, Tensor]) -> None:
        self._routes, self._held = routes, routes.plan.dst_index.of_rank(rank)
        self._params = LocalParams(routes.plan.dst_index, rank, params, side="destination")

    def begin(self, route: Route) -> None:
        """See `Endpoint.begin`."""

    def into(self, route: Route, src: Source, device: torch.device) -> Destination:
        """See `Endpoint.into`."""
        return Params(route.part, src, self._params, device)

    def sums(self, places: Sequence[Place], *, brief: bool) -> Sequence[int]:
        """See `Endpoint.sums`."""
        return sums_in(places, self._blocks, brief=brief)

    def _blocks(self, tensor: str) -> Iterator[Weighted]:
        yield from ((1, one.box, self._params.view_in(one, one.box)) for one in self._held[tensor])
        for echo in self._routes.part.echoes:
            if echo.tensor == tensor:
                places = (self._params.view_in(one, echo.box) for one in (echo.first, echo.second))
                yield from twice(echo.box, *places)

    def end(self) -> None:
        """See `Endpoint.end`."""


class Behind:
    """An `Endpoint`: parameters of another process, behind a sink."""

    def __init__(self, sink: WindowSink, dtype: str) -> None:
        self._sink, self._dtype = sink, dtype
        self.sums = sink.sums
        self.end = sink.end

    @property
    def needs_complete(self) -> bool:
        """See `Endpoint.needs_complete`."""
        return self._sink.needs_complete

    @property
    def is_lost(self) -> bool:
        """See `Endpoint.is_lost`."""
        return self._sink.is_lost

    def begin(self, route: Route) -> None:
        """See `Endpoint.begin`."""
        self._sink.begin(_manifest(route), self._dtype)

    def into(self, route: Route, src: Source, device: torch.device) -> Destination:
        """See `Endpoint.into`."""
        return Windowed(_manifest(route).windows, route.receives, route.sends, src, self._sink)


def endpoint(routes: Routes, rank: int, given: Mapping[str, Tensor] | WindowSink) -> Endpoint:
    """The endpoint of a rank that brings its parameters or a sink.

    Raises:
        LayoutError: It brings the one where the transfer was made for the other, or parameters that do not fit.
    """
    is_behind = routes.route().manifest is not None
    if isinstance(given, Mapping) == is_behind:
        raise LayoutError(
            f"reshard: destination rank {rank} brings a {type(given).__name__}; needs "
            f"{'a WindowSink' if is_behind else 'a mapping of its parameters'}, since the transfer was made with "
            f"windowed={routes.windowed}; change one of them"
        )
    if isinstance(given, Mapping):
        return InPlace(routes, rank, given)
    return Behind(given, routes.plan.dst.dtype)


def _manifest(route: Route) -> Manifest:
    assert route.manifest is not None, "there is a sink only where there is a manifest"
    return route.manifest
