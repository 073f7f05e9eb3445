"""Proof after a transfer: what each destination holds against what its sources gave, by sums that fit any cut."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlhf.errors import WeightSyncError
from rlhf.reshard.checksum import MODULUS, checksum
from rlhf.reshard.execute import LocalParams
from rlhf.reshard.layout import Box, ParamLayout
from rlhf.reshard.plan import Plan, RankPlan

GatherFn = Callable[[list[int]], list[list[int]]]
"""The numbers of all ranks of both pools, in order of rank. Collective over them."""

HeldFn = Callable[[Sequence[str]], Mapping[str, int]]
"""Checksums of what this rank holds of some tensors, taken by whoever has its destination parameters."""


def compare_weights(plan: Plan, part: RankPlan, *, src: LocalParams, held: HeldFn, gather: GatherFn) -> None:
    """Compare both sides of a finished transfer. Collective over the ranks of both pools.

    Raises:
        WeightSyncError: A destination does not hold what its sources hold; on all ranks, with the rank and the tensors.
    """
    given = given_sums(part, src)
    mine = held(list(plan.dst_index.of_rank(part.rank)))
    rows = gather([*(_total(given.get(rank, {})) for rank in plan.ranks), _total(mine)])
    for at, rank in enumerate(plan.ranks):
        if sum(row[at] for row in rows) % MODULUS == rows[at][-1] % MODULUS:
            continue
        names, its_own = list(plan.order), mine if rank == part.rank else {}
        by_name = gather([int(of.get(name, 0)) for of in (given.get(rank, {}), its_own) for name in names])
        wrong = [
            name
            for place, name in enumerate(names)
            if (sum(row[place] for row in by_name) - by_name[at][len(names) + place]) % MODULUS
        ]
        raise WeightSyncError(
            f"reshard: after the transfer rank {rank} holds other weights than its sources: {', '.join(wrong)}; "
            "needs equal checksums; do not write to parameters while a transfer runs"
        )


def given_sums(part: RankPlan, src: LocalParams) -> dict[int, dict[str, Tensor]]:
    """Checksums of what this rank gives, by destination rank and tensor, from its source parameters."""
    of_block: dict[tuple[str, Box], Tensor] = {}
    found: dict[int, dict[str, Tensor]] = {}
    for move in part.given:
        key = (move.tensor, move.box)
        if key not in of_block:
            of_block[key] = checksum(*key, src.view(*key)).cpu()
        to = found.setdefault(move.dst_rank, {})
        to[move.tensor] = to[move.tensor] + of_block[key] if move.tensor in to else of_block[key]
    return found


def held_sums(
    part: RankPlan, held: Mapping[str, tuple[ParamLayout, ...]], dst: LocalParams, tensors: Sequence[str]
) -> dict[str, int]:
    """Checksums of a rank's destination parameters, by tensor; what it holds twice must be equal and counts once."""
    found = {
        tensor: sum(int(checksum(tensor, one.box, dst.view_in(one, one.box))) for one in held[tensor])
        for tensor in tensors
    }
    for echo in part.echoes:
        if echo.tensor in found:
            found[echo.tensor] -= int(checksum(echo.tensor, echo.box, dst.view_in(echo.first, echo.box)))
    return found


def _total(sums: Mapping[str, Tensor] | Mapping[str, int]) -> int:
    return sum(int(of_tensor) for of_tensor in sums.values()) % MODULUS
