"""Holdings of a layout turned round: for each logical tensor, which ranks hold which box of it."""

from collections.abc import Mapping

from rlhf.reshard.layout import Box, ModelLayout, ParamLayout

Holders = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes, each with the ranks that hold it, ascending."""


class HolderIndex:
    """Boxes of each tensor with the ranks that hold them.

    Ranks whose `holdings` are one and the same tuple are indexed once; the cost is the number of distinct holdings
    plus one call of `layout.holdings` a rank.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        alike: dict[int, tuple[tuple[ParamLayout, ...], list[int]]] = {}
        self._alike_as: dict[int, int] = {}
        for rank in layout.ranks:
            held = layout.holdings(rank)
            alike.setdefault(id(held), (held, []))[1].append(rank)
            self._alike_as[rank] = id(held)
        self._ranks: dict[str, dict[Box, list[list[int]]]] = {name: {} for name in layout.tensors}
        for held, ranks in alike.values():
            for tensor, box in {(one.tensor, one.box): None for one in held}:
                self._ranks[tensor].setdefault(box, []).append(ranks)
        self._alike = alike
        self._joined: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._holders: dict[str, Holders] = {}
        self._known: dict[Holders, Holders] = {}
        self._by_tensor: dict[int, Mapping[str, tuple[ParamLayout, ...]]] = {}

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        """Distinct boxes of a tensor that any rank holds, in order of first rank."""
        return tuple(self._ranks[tensor])

    def ranks(self, tensor: str, box: Box) -> tuple[int, ...]:
        """Ranks that hold exactly this box of a tensor, ascending."""
        alike = self._ranks[tensor][box]
        key = tuple(map(id, alike))  # the lists live as long as the index, and tensors of one stage share them
        if key not in self._joined:
            self._joined[key] = tuple(sorted({rank for ranks in alike for rank in ranks}))
        return self._joined[key]

    def holders(self, tensor: str) -> Holders:
        """Boxes of a tensor with their ranks: one and the same tuple for all tensors where they are the same."""
        if tensor not in self._holders:
            key = tuple((box, self.ranks(tensor, box)) for box in self._ranks[tensor])
            self._holders[tensor] = self._known.setdefault(key, key)
        return self._holders[tensor]

    def of_rank(self, rank: int) -> Mapping[str, tuple[ParamLayout, ...]]:
        """What one rank holds, by tensor; empty for a rank outside the layout's pool."""
        key = self._alike_as.get(rank)
        if key is None:
            return {}
        if key not in self._by_tensor:
            self._by_tensor[key] = _by_tensor(self._alike[key][0])
        return self._by_tensor[key]


def _by_tensor(held: tuple[ParamLayout, ...]) -> Mapping[str, tuple[ParamLayout, ...]]:
    found: dict[str, list[ParamLayout]] = {}
    for one in held:
        found.setdefault(one.tensor, []).append(one)
    return {tensor: tuple(ones) for tensor, ones in found.items()}
