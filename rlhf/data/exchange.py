"""Moving rows between ranks: one planned, point-to-point exchange of ragged tables.

Every rank knows, by rule, which rank holds each row and which ranks want it, so nobody asks. Each pair of ranks that
has rows to move sends two messages: a header of fixed size (the row lengths) and one flat payload. Tables travel in
host memory over a gloo group, with tags of their own for each exchange, so that several may be under way together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from rlhf.data.ragged import Ragged
from rlhf.data.table import Table
from rlhf.errors import ShapeError

TableT = TypeVar("TableT", bound=Table)

_ALIGN = 8  # bytes; a view of a payload as any dtype must start at a multiple of its item size


@dataclass(frozen=True, slots=True)
class Message:
    """Buffers on their way; they must stay alive until the works are done."""

    works: tuple[Work, ...]
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        """Block until every buffer has left."""
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where each row of a global batch lies and where it goes.

    `sources[i]` is the rank that holds row i, `targets[i]` the ranks that want it. On every rank the rows lie in
    ascending i; they arrive in ascending i too.
    """

    sources: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    def held(self, rank: int) -> list[int]:
        """Rows that a rank holds before the exchange."""
        return [i for i, at in enumerate(self.sources) if at == rank]

    def wanted(self, rank: int) -> list[int]:
        """Rows that a rank holds after it."""
        return [i for i, ranks in enumerate(self.targets) if rank in ranks]


def _leaves(table: type[Table]) -> Iterator[tuple[bool, torch.dtype]]:
    """(is it ragged, dtype) of each column, nested tables flattened."""
    for field, kind in table.columns():
        if kind in (Tensor, Ragged):
            yield kind is Ragged, field.metadata["dtype"]
        elif isinstance(kind, type) and issubclass(kind, Table):
            yield from _leaves(kind)
        else:
            raise ShapeError(
                f"exchange: column {table.__name__}.{field.name} is {kind}; only tensors, Ragged and tables of them "
                "travel between ranks; send a table without it"
            )


def _values(table: Table) -> Iterator[Tensor | Ragged]:
    for field, _ in table.columns():
        value = getattr(table, field.name)
        if isinstance(value, Table):
            yield from _values(value)
        else:
            yield value


def _rebuild(table: type[TableT], values: Iterator[Tensor | Ragged]) -> TableT:
    return table(
        *(
            _rebuild(kind, values) if isinstance(kind, type) and issubclass(kind, Table) else next(values)
            for _, kind in table.columns()
        )
    )


def pack(table: Table) -> tuple[Tensor, Tensor]:
    """Header int64 [rows * ragged columns] and payload uint8 of a table.

    Raises:
        ShapeError: A column has another dtype than it declares, or is of a kind that cannot travel.
    """
    lengths, parts = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.uint8)]
    for (_, dtype), value in zip(_leaves(type(table)), _values(table), strict=True):
        flat = value.values if isinstance(value, Ragged) else value
        if flat.dtype != dtype:
            raise ShapeError(f"exchange: a column of {type(table).__name__} is {flat.dtype}; it declares {dtype}")
        if isinstance(value, Ragged):
            lengths.append(value.lengths)
        data = flat.detach().cpu().contiguous().view(torch.uint8).reshape(-1)
        parts += [data, data.new_zeros(-data.numel() % _ALIGN)]
    return torch.cat(lengths), torch.cat(parts)


def header_size(table: type[Table], num_rows: int) -> int:
    """Entries in the header of num_rows rows."""
    return num_rows * sum(is_ragged for is_ragged, _ in _leaves(table))


def _spans(table: type[Table], num_rows: int, header: Tensor) -> Iterator[tuple[torch.dtype, Tensor | None, int, int]]:
    """For each column: dtype, row lengths (ragged only), first payload byte, end of its values."""
    lengths, start = iter(header.split(num_rows)), 0
    for is_ragged, dtype in _leaves(table):
        rows = next(lengths) if is_ragged else None
        stop = start + dtype.itemsize * (num_rows if rows is None else int(rows.sum()))
        yield dtype, rows, start, stop
        start = stop + -stop % _ALIGN


def payload_bytes(table: type[Table], num_rows: int, header: Tensor) -> int:
    """Bytes of the payload that a header of num_rows > 0 rows announces."""
    *_, (_, _, _, stop) = _spans(table, num_rows, header)
    return stop + -stop % _ALIGN


def unpack(table: type[TableT], num_rows: int, header: Tensor, payload: Tensor) -> TableT:
    """The num_rows > 0 rows that pack() was given."""

    def read() -> Iterator[Tensor | Ragged]:
        for dtype, rows, start, stop in _spans(table, num_rows, header):
            values = payload[start:stop].view(dtype)
            yield values if rows is None else Ragged(values, rows)

    return _rebuild(table, read())


class Exchange(Generic[TableT]):
    """One exchange under way; made by every rank that sends or receives a row (another rank may make it too).

    Making it posts the sends and returns at once; `receive` blocks until this rank's rows are there.
    """

    def __init__(self, rows: TableT, plan: RowPlan, *, group: ProcessGroup, tag: int) -> None:
        """`rows`: this rank's rows, maybe none. `tag`: it and tag + 1 are used by no other exchange under way."""
        self._table, self._plan, self._group, self._tag = type(rows), plan, group, tag
        self._rank = dist.get_rank()
        held = plan.held(self._rank)
        if len(held) != len(rows):
            raise ShapeError(
                f"exchange: rank {self._rank} brings {len(rows)} rows of {self._table.__name__}; the plan says "
                f"{len(held)}; bring the rows that the rule of ownership gives this rank"
            )
        by_target: dict[int, list[int]] = {}
        for at, row in enumerate(held):
            for target in plan.targets[row]:
                by_target.setdefault(target, []).append(at)
        own = by_target.pop(self._rank, [])
        self._own = rows.select(torch.tensor(own, dtype=torch.int64))
        self._own_rows = [held[at] for at in own]
        self.sent = tuple(self._send(rows, by_target))

    def _send(self, rows: TableT, by_target: dict[int, list[int]]) -> Iterator[Message]:
        packed: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # tp and pp peers want the same rows
        for target, at in by_target.items():
            key = tuple(at)
            if key not in packed:
                packed[key] = pack(rows.select(torch.tensor(at)))
            works = [
                dist.isend(buffer, target, group=self._group, tag=self._tag + i)
                for i, buffer in enumerate(packed[key])
                if buffer.numel()
            ]
            yield Message(tuple(w for w in works if w is not None), packed[key])

    def receive(self) -> TableT:
        """The rows that this rank wants, in ascending order of row."""
        by_source: dict[int, list[int]] = {}
        for row in self._plan.wanted(self._rank):
            if self._plan.sources[row] != self._rank:
                by_source.setdefault(self._plan.sources[row], []).append(row)
        parts, order = [self._own], list(self._own_rows)
        for source, rows in by_source.items():
            header = torch.empty(header_size(self._table, len(rows)), dtype=torch.int64)
            if header.numel():
                dist.recv(header, source, group=self._group, tag=self._tag)
            payload = torch.empty(payload_bytes(self._table, len(rows), header), dtype=torch.uint8)
            if payload.numel():
                dist.recv(payload, source, group=self._group, tag=self._tag + 1)
            parts.append(unpack(self._table, len(rows), header, payload))
            order += rows
        return self._table.concat(parts).select(torch.tensor(order, dtype=torch.int64).argsort())
