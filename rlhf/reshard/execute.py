"""Carries out one rank's part of a plan: local copies, packed messages, two buckets under way at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf.errors import LayoutError
from rlhf.metrics.timers import Kind, SpanFn, no_span
from rlhf.reshard.bucket import Bucket, Message
from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import Box, ModelLayout, ParamLayout
from rlhf.reshard.plan import RankPlan
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


class Staging:
    """Two flat buffers, used in turn: while one bucket is under way the next is packed into the other.

    They are kept from one transfer to the next; `num_bytes` is all that a transfer needs beyond the parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], dtype: str) -> None:
        self._elements = [max((bucket.num_elements for bucket in buckets[at::2]), default=0) for at in (0, 1)]
        self._dtype = torch_dtype(dtype)
        self._buffers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return sum(self._elements) * self._dtype.itemsize

    def buffer(self, number: int, device: torch.device) -> Tensor:
        """The buffer for bucket `number`."""
        if not self._buffers or self._buffers[0].device != device:
            self._buffers = [torch.empty(count, dtype=self._dtype, device=device) for count in self._elements]
        return self._buffers[number % 2]


class Destination(Protocol):
    """Where one rank's blocks go: its own parameters (`Params`), or windows on those of another process."""

    def admits(self, bucket: Bucket) -> bool:
        """Whether there is a place for what the bucket receives, without anything more arriving first."""

    def room(self, message: Message) -> Tensor | None:
        """Flat memory in which a message may be received as it is; None: it is received elsewhere."""

    def arrived(self, message: Message, data: Tensor) -> None:
        """A message lies in `data`, which is its room where it has one. Called for each message, in their order."""

    def own(self) -> None:
        """Take what the rank gives to itself, as far as there is a place for it; called again and again."""

    def finish(self) -> None:
        """Everything has arrived."""


class Params:
    """A `Destination`: parameters of this process, written in place. Padding is left alone."""

    def __init__(self, part: RankPlan, src: LocalParams, dst: LocalParams, device: torch.device) -> None:
        self._part, self._src, self._dst, self._device = part, src, dst, device
        self._has_own = False

    def admits(self, bucket: Bucket) -> bool:
        """See `Destination.admits`: always."""
        return True

    def room(self, message: Message) -> Tensor | None:
        """See `Destination.room`: the parameter itself, where the message is one contiguous block of it."""
        return _contiguous(message, self._dst, self._device)

    def arrived(self, message: Message, data: Tensor) -> None:
        """See `Destination.arrived`."""
        if self.room(message) is None:
            for view, flat in _cut(message, data, self._dst):
                view.copy_(flat)

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
    with torch.no_grad():
        under_way: list[_Transfer] = []
        for number, bucket in enumerate(buckets):
            while under_way and (len(under_way) > 1 or not dst.admits(bucket)):
                under_way.pop(0).finish()
            with span(f"post bucket {number}"):
                buffer = staging.buffer(number, device)
                under_way.append(_Transfer(number, bucket, src, dst, transport, buffer, span))
            with span("copy own"):
                dst.own()
        for transfer in under_way:
            transfer.finish()
        with span("finish"):
            dst.finish()


class _Transfer:
    """One bucket under way."""

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        src: LocalParams,
        dst: Destination,
        transport: Transport,
        buffer: Tensor,
        span: SpanFn,
    ) -> None:
        self._number, self._span = number, span
        self._dst, self._buffer, self._used = dst, buffer, 0
        self._incoming = [(message, self._landing(message)) for message in bucket.receives]
        parcels = [Parcel(message.src_rank, data) for message, data in self._incoming]
        self._pending: Pending = transport.post(parcels, self._packed(bucket.sends, src))

    def finish(self) -> None:
        """Wait, then put what arrived where it belongs."""
        with self._span(f"bucket {self._number}", Kind.WAIT):
            self._pending.wait()
        with self._span(f"unpack bucket {self._number}"):
            for message, data in self._incoming:
                self._dst.arrived(message, data)

    def _landing(self, message: Message) -> Tensor:
        room = self._dst.room(message)
        return self._take(message) if room is None else room

    def _packed(self, messages: Sequence[Message], src: LocalParams) -> Iterator[Parcel]:
        for message in messages:
            data = _contiguous(message, src, self._buffer.device)
            if data is None:
                data = self._take(message)
                for view, flat in _cut(message, data, src):
                    flat.copy_(view)
            yield Parcel(message.dst_rank, data)

    def _take(self, message: Message) -> Tensor:
        self._used += message.num_elements
        return self._buffer[self._used - message.num_elements : self._used]


def _contiguous(message: Message, params: LocalParams, device: torch.device) -> Tensor | None:
    """The message as it lies in the parameter, when it is one block, contiguous, where the transport can reach it."""
    if len(message.moves) > 1:
        return None
    view = params.view(message.moves[0].tensor, message.moves[0].box)
    return view.view(-1) if view.is_contiguous() and view.device == device else None


def _cut(message: Message, data: Tensor, params: LocalParams) -> Iterator[tuple[Tensor, Tensor]]:
    """For each block of a message: (view of the parameter, its part of the packed data in the same shape)."""
    at = 0
    for move in message.moves:
        count = move.box.num_elements
        yield params.view(move.tensor, move.box), data[at : at + count].view(move.box.shape)
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
