"""Which ranks of the rollout pool share an engine: pure integers, the same answer as `RolloutConfig.engines`."""

from rlhf.dist.grid import Grid
from rlhf.errors import LayoutError


def engine_grid(*, tp: int, dp: int, first_rank: int, stride: int = 1) -> Grid:
    """The pool as a grid with axis `tp`: the ranks of one engine lie `stride` apart.

    With stride 1 the other axis is `engine`. Else each block of tp * stride ranks holds `stride` engines side by side.

    Raises:
        LayoutError: dp is no multiple of stride.
    """
    if dp % stride:
        raise LayoutError(
            f"rollout.stride: {stride} given, but rollout.dp = {dp}; needs a divisor, since so many engines lie side "
            "by side; change one"
        )
    if stride == 1:
        return Grid(("tp", "engine"), (tp, dp), first_rank)
    return Grid(("engine", "tp", "block"), (stride, tp, dp // stride), first_rank)
