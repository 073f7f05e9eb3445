"""Carries out one rank's part of a plan: local copies, packed messages, two buckets under way at a time."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf.errors import LayoutError
from rlhf.metrics.timers import Kind, SpanFn, no_span
from rlhf.reshard.bucket import Bucket, Message
from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import Move, RankPlan
from rlhf.reshard.staging import Staging
from rlhf.reshard.transport import Parcel, Pending, Transport, torch_dtype


class LocalParams:
    """One rank's parameters seen through its layout: blocks of logical tensors as views.

    Raises:
        LayoutError: A parameter of the layout is missing, too small, or of another dtype than the layout says.
    """

    def __init__(self, index: HolderIndex, rank: int, params: Mapping[str, Tensor], *, side: str) -> None:
        self._held, self._params = index.of_rank(rank), params
        for held in self._held.values():
            for one in held:
                _check(one, params, index.layout, f"reshard: {side} rank {rank}")

    def view(self, tensor: str, box: Box) -> Tensor:
        """The block as a view of the first local parameter that holds it whole."""
        return self.view_in(next(one for one in self._held[tensor] if one.box.contains(box)), box)

    def view_in(self, one: ParamLayout, box: Box) -> Tensor:
        """The block as a view of the given parameter."""
        return self._params[one.param].detach()[one.param_box(box).slices]


class Source(Protocol):
    """Where one rank's blocks come from: its own parameters (`LocalParams`), or weights at rest."""

    def view(self, tensor: str, box: Box) -> Tensor:
        """A block of a logical tensor."""


class Destination(Protocol):
    """Where one rank's blocks go: its own parameters (`Params`), or windows on those of another process."""

    keeps: bool
    """What arrived stays where `held` found it until all ranks are done with the whole transfer."""

    def admits(self, bucket: Bucket) -> bool:
        """Whether there is a place for what the bucket receives, without anything more arriving first."""

    def room(self, message: Message) -> Tensor | None:
        """Flat memory in which a message may be received as it is; None: it is received elsewhere."""

    def arrived(self, message: Message, data: Tensor) -> None:
        """A message lies in `data`, which is its room where it has one. Called for each message, in their order."""

    def held(self, move: Move) -> Tensor:
        """A block that arrived, as a view, to be passed on. Asked for only when the plan's fanout is `node`."""

    def passed(self, message: Message) -> None:
        """A message of such blocks has left: they need not be kept for it."""

    def own(self) -> None:
        """Take what the rank gives to itself, as far as there is a place for it; called again and again."""

    def finish(self) -> None:
        """Everything has arrived."""


class Params:
    """A `Destination`: parameters of this process, written in place. Padding is left alone."""

    keeps = True

    def __init__(self, part: RankPlan, src: Source, dst: LocalParams, device: torch.device) -> None:
        self._part, self._src, self._dst, self._device = part, src, dst, device
        self._has_own = False

    def admits(self, bucket: Bucket) -> bool:
        """See `Destination.admits`: always."""
        return True

    def room(self, message: Message) -> Tensor | None:
        """See `Destination.room`: the parameter itself, where the message is one contiguous block of it."""
        return _contiguous(self.held(message.moves[0]), self._device) if len(message.moves) == 1 else None

    def arrived(self, message: Message, data: Tensor) -> None:
        """See `Destination.arrived`."""
        if self.room(message) is None:
            for move, flat in _cut(message, data):
                self.held(move).copy_(flat)

    def held(self, move: Move) -> Tensor:
        """See `Destination.held`."""
        return self._dst.view(move.tensor, move.box)

    def passed(self, message: Message) -> None:
        """See `Destination.passed`."""

    def own(self) -> None:
        """See `Destination.own`: all at once."""
        if not self._has_own:
            for move in self._part.copies:
                self._dst.view(move.tensor, move.box).copy_(self._src.view(move.tensor, move.box))
        self._has_own = True

    def finish(self) -> None:
        """See `Destination.finish`: fills what the rank holds twice."""
        self.own()
        for echo in self._part.echoes:
            self._dst.view_in(echo.second, echo.box).copy_(self._dst.view_in(echo.first, echo.box))


def execute(
    buckets: Sequence[Bucket],
    *,
    src: LocalParams,
    dst: Destination,
    transport: Transport,
    staging: Staging,
    device: torch.device,
    span: SpanFn = no_span,
) -> None:
    """Fill this rank's destination and serve the others. All ranks of both pools must call.

    Reads the source parameters as they are and hands each destination element over once. `device` is where the
    transport works; parameters elsewhere are staged through it. `span` names each bucket, for timelines.
    """
    staging.begin()
    with torch.no_grad():
        under_way: deque[_Transfer] = deque()
        for number, bucket in enumerate(buckets):
            while under_way and _must_wait(under_way, bucket, dst):
                under_way.popleft().finish()
            with span(f"post bucket {number}"):
                under_way.append(_Transfer(number, bucket, src, dst, transport, staging, device, span))
            with span("copy own"):
                dst.own()
        while under_way:
            under_way.popleft().finish()
        with span("finish"):
            dst.finish()


def _must_wait(under_way: Sequence["_Transfer"], bucket: Bucket, dst: Destination) -> bool:
    """Whether the oldest bucket under way must be done before the next starts."""
    return len(under_way) > 1 or under_way[0].number <= bucket.after or not dst.admits(bucket)


class _Transfer:
    """One bucket under way."""

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        src: LocalParams,
        dst: Destination,
        transport: Transport,
        staging: Staging,
        device: torch.device,
        span: SpanFn,
    ) -> None:
        self.number, self._span, self._src, self._dst = number, span, src, dst
        rooms = [(message, dst.room(message)) for message in bucket.receives]
        ready = [(message, self._ready(message, device)) for message in bucket.sends]
        staged = sum(message.num_elements for message, place in (*rooms, *ready) if place is None)
        self._free = staging.take(number, staged, device)
        self._incoming = [(message, self._take(message) if room is None else room) for message, room in rooms]
        parcels = [Parcel(message.src_rank, data) for message, data in self._incoming]
        self._passed = [message for message in bucket.sends if message.passed_on]
        self._pending: Pending = transport.post(parcels, self._packed(ready))

    def finish(self) -> None:
        """Wait, then put what arrived where it belongs."""
        with self._span(f"bucket {self.number}", Kind.WAIT):
            self._pending.wait()
        for message in self._passed:
            self._dst.passed(message)
        with self._span(f"unpack bucket {self.number}"):
            for message, data in self._incoming:
                self._dst.arrived(message, data)

    def _packed(self, ready: Sequence[tuple[Message, Tensor | None]]) -> Iterator[Parcel]:
        for message, place in ready:
            data = self._take(message) if place is None else place
            if place is None:
                for move, flat in _cut(message, data):
                    flat.copy_(self._read(move))
            stays = self._dst.keeps or not message.passed_on
            yield Parcel(message.dst_rank, data, stable=stays and place is not None)

    def _ready(self, message: Message, device: torch.device) -> Tensor | None:
        """A message to send as it lies there, when nothing need be packed."""
        return _contiguous(self._read(message.moves[0]), device) if len(message.moves) == 1 else None

    def _read(self, move: Move) -> Tensor:
        return self._dst.held(move) if move.passed_on else self._src.view(move.tensor, move.box)

    def _take(self, message: Message) -> Tensor:
        taken, self._free = self._free[: message.num_elements], self._free[message.num_elements :]
        return taken


def _contiguous(view: Tensor, device: torch.device) -> Tensor | None:
    """A block as flat memory, when it is contiguous, where the transport can reach it."""
    return view.view(-1) if view.is_contiguous() and view.device == device else None


def _cut(message: Message, data: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Each block of a message with its part of the packed data in the block's shape."""
    at = 0
    for move in message.moves:
        count = move.box.num_elements
        yield move, data[at : at + count].view(move.box.shape)
        at += count


def _check(one: ParamLayout, params: Mapping[str, Tensor], layout: ModelLayout, where: str) -> None:
    if one.param not in params:
        raise LayoutError(f"{where}: no parameter {one.param}, which should hold {one.tensor}; hand in all parameters")
    param, place = params[one.param], one.param_box(one.box)
    fits = param.dim() == len(place.spans) and all(
        stop <= extent for (_, stop), extent in zip(place.spans, param.shape, strict=True)
    )
    if not fits:
        raise LayoutError(
            f"{where}: {one.param} has shape {tuple(param.shape)}; needs room for {one.tensor} at {place.spans}; "
            "check that the layout belongs to this model"
        )
    if param.dtype != torch_dtype(layout.dtype):
        raise LayoutError(
            f"{where}: {one.param} is {param.dtype}, its layout says {layout.dtype}; nothing is cast on the way; "
            "set the dtype of the model or of the layout"
        )
