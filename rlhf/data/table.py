"""The operations every batch has, written once over its fields."""

from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Any, Self, get_type_hints

import torch
from torch import Tensor

from rlhf.data.ragged import Ragged
from rlhf.errors import ShapeError


def column(dtype: torch.dtype) -> Any:
    """Declare a required tensor or Ragged column and the dtype of its values."""
    return field(metadata={"dtype": dtype})


class Table:
    """Base of the frozen batch dataclasses: rows in every field, in the same order."""

    __slots__ = ()

    def __post_init__(self) -> None:
        rows = {f.name: len(column) for f, column in zip(fields(self), self._columns(), strict=True)}  # type: ignore[arg-type]
        if len(set(rows.values())) > 1:
            (first, count), *others = rows.items()
            odd = next((name, n) for name, n in others if n != count)
            raise ShapeError(f"{type(self).__name__}: {first} has {count} rows, {odd[0]} has {odd[1]}; needs as many")

    def __len__(self) -> int:
        return len(self._columns()[0])

    @classmethod
    def columns(cls) -> tuple[tuple[Field[Any], Any], ...]:
        """The declared columns, in order, each with its type."""
        hints = get_type_hints(cls)
        return tuple((f, hints[f.name]) for f in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> Self:
        """No rows, with every column's dtype."""

        def none_of(f: Field[Any], kind: Any) -> Any:
            if kind is Ragged:
                return Ragged.of([], dtype=f.metadata["dtype"])
            if kind is Tensor:
                return torch.empty(0, dtype=f.metadata["dtype"])
            return kind.empty() if isinstance(kind, type) and issubclass(kind, Table) else ()

        return cls(*(none_of(f, kind) for f, kind in cls.columns()))

    def _columns(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]

    def _map(self, change: Callable[[Any], Any]) -> Self:
        return type(self)(*(change(column) for column in self._columns()))

    def select(self, index: Tensor) -> Self:
        """Rows in the order of index (int64 [any])."""

        def pick(column: Any) -> Any:
            if isinstance(column, tuple):
                return tuple(column[i] for i in index.tolist())
            return column.select(index) if isinstance(column, (Ragged, Table)) else column[index]

        return self._map(pick)

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Consecutive parts of so many rows each; the sizes must add up to the rows."""
        if sum(sizes) != len(self):
            raise ShapeError(f"split: sizes {list(sizes)} do not add up to {len(self)} rows")
        return [self.select(rows) for rows in torch.arange(len(self)).split(list(sizes))]

    def to(self, device: torch.device) -> Self:
        """Tensors on a device; lengths and tuples stay on the host."""
        return self._map(lambda c: c.to(device) if isinstance(c, (Tensor, Ragged, Table)) else c)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Rows of all parts (at least one), in order."""
        if not parts:
            raise ShapeError(f"{cls.__name__}.concat: no parts; needs at least one, if only with no rows")

        def join(columns: tuple[Any, ...]) -> Any:
            first = columns[0]
            if isinstance(first, tuple):
                return tuple(item for column in columns for item in column)
            if isinstance(first, (Ragged, Table)):
                return type(first).concat(columns)
            return torch.cat(columns)

        return cls(*(join(c) for c in zip(*(p._columns() for p in parts), strict=True)))
