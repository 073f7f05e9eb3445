"""Rows of different lengths without padding: flat values and a length per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Ragged:
    """B rows of 1-D data, laid end to end.

    values: [sum lengths], any dtype. lengths: int64 [B] on the CPU, since it steers control flow.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.lengths.dim() != 1 or self.lengths.dtype != torch.int64:
            raise ShapeError(
                f"Ragged: values {tuple(self.values.shape)}, lengths {tuple(self.lengths.shape)} {self.lengths.dtype}; "
                "needs 1-D values and 1-D int64 lengths"
            )
        if int(self.lengths.sum()) != self.values.numel():
            raise ShapeError(
                f"Ragged: lengths sum to {int(self.lengths.sum())}, but there are {self.values.numel()} values"
            )
        if self.lengths.numel() and int(self.lengths.min()) < 0:
            raise ShapeError(f"Ragged: a negative length, {int(self.lengths.min())}; needs 0 or more")

    @staticmethod
    def of(rows: Sequence[Tensor], *, dtype: torch.dtype) -> "Ragged":
        """Rows laid end to end; an empty sequence gives zero rows of that dtype."""
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0)
        return Ragged(values.to(dtype), lengths)

    def __len__(self) -> int:
        return self.lengths.numel()

    @property
    def cu_seqlens(self) -> Tensor:
        """int64 [B + 1]: where each row starts, and the total."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def rows(self) -> tuple[Tensor, ...]:
        """One view per row."""
        return self.values.split(self.lengths.tolist())

    def like(self, values: Tensor) -> "Ragged":
        """Other values over the same rows."""
        return Ragged(values, self.lengths)

    def select(self, index: Tensor) -> "Ragged":
        """Rows in the order of index (int64 [any] on the CPU; a row may come again)."""
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise ShapeError(
                f"select: rows {int(index.min())} to {int(index.max())} asked for; there are {len(self)} rows"
            )
        lengths, ends = self.lengths[index], self.lengths.cumsum(0)[index]
        # A value of output row r stays at a fixed distance from its place in the input: row end minus row end.
        shift = (ends - lengths.cumsum(0)).repeat_interleave(lengths)
        source = shift + torch.arange(shift.numel())
        return Ragged(self.values[source.to(self.values.device)], lengths)

    def to(self, device: torch.device) -> "Ragged":
        """Values on a device; lengths stay on the CPU."""
        return Ragged(self.values.to(device), self.lengths)

    @staticmethod
    def concat(parts: Sequence["Ragged"]) -> "Ragged":
        """Rows of all parts (at least one), in order."""
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def row_ids(self) -> Tensor:
        """int64 [sum lengths]: the row each value belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)
