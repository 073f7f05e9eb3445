"""Carries out one rank's part of a plan: local copies, packed messages, two buckets under way at a time."""

from collections.abc import Iterator, Mapping, Sequence

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


def execute(
    part: RankPlan,
    buckets: Sequence[Bucket],
    *,
    src: LocalParams,
    dst: LocalParams,
    transport: Transport,
    staging: Staging,
    device: torch.device,
    span: SpanFn = no_span,
) -> None:
    """Fill this rank's destination parameters and serve the others. All ranks of both pools must call.

    Reads the source parameters as they are and writes each destination element once; padding is left alone. `device` is
    where the transport works; parameters elsewhere are staged through it. `span` names each bucket, for timelines.
    """

    def post(number: int, bucket: Bucket) -> _Transfer:
        with span(f"post bucket {number}"):
            return _Transfer(number, bucket, src, dst, transport, staging.buffer(number, device), span)

    with torch.no_grad():
        under_way = [post(0, buckets[0])] if buckets else []
        with span("copy own"):
            for move in part.copies:
                dst.view(move.tensor, move.box).copy_(src.view(move.tensor, move.box))
        for number, bucket in enumerate(buckets[1:], start=1):
            under_way.append(post(number, bucket))
            under_way.pop(0).finish()
        for transfer in under_way:
            transfer.finish()
        for echo in part.echoes:
            dst.view_in(echo.second, echo.box).copy_(dst.view_in(echo.first, echo.box))


class _Transfer:
    """One bucket under way."""

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        src: LocalParams,
        dst: LocalParams,
        transport: Transport,
        buffer: Tensor,
        span: SpanFn,
    ) -> None:
        self._number, self._span = number, span
        self._dst, self._buffer, self._used = dst, buffer, 0
        self._incoming = [(message, *self._landing(message)) for message in bucket.receives]
        parcels = [Parcel(message.src_rank, data) for message, data, _ in self._incoming]
        self._pending: Pending = transport.post(parcels, self._packed(bucket.sends, src))

    def finish(self) -> None:
        """Wait, then put what arrived where it belongs."""
        with self._span(f"bucket {self._number}", Kind.WAIT):
            self._pending.wait()
        with self._span(f"unpack bucket {self._number}"):
            for message, data, direct in self._incoming:
                if not direct:
                    for view, flat in _cut(message, data, self._dst):
                        view.copy_(flat)

    def _landing(self, message: Message) -> tuple[Tensor, bool]:
        """Where a message is received: straight in the parameter when it is one contiguous block there."""
        direct = _contiguous(message, self._dst, self._buffer.device)
        return (self._take(message), False) if direct is None else (direct, True)

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
