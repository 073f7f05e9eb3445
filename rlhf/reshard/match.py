"""Whether two layouts are layouts of one model, each whole. Every rank finds the same fault and says it by name."""

from rlhf.errors import LayoutError
from rlhf.reshard.index import HolderIndex
from rlhf.reshard.layout import ITEM_BYTES, Box, ModelLayout


def check_names_shapes_dtypes(src: ModelLayout, dst: ModelLayout) -> None:
    """Raise LayoutError unless both layouts list the same tensors with the same shapes and one known dtype."""
    for name in src.tensors:
        if name not in dst.tensors:
            raise LayoutError(
                f"reshard: {name} is held at the source but unknown at the destination; describe it there"
            )
    for name, shape in dst.tensors.items():
        if name not in src.tensors:
            raise LayoutError(f"reshard: {name} is wanted at the destination but unknown at the source; needs both")
        if tuple(src.tensors[name]) != tuple(shape):
            raise LayoutError(
                f"reshard: {name} has shape {tuple(src.tensors[name])} at the source and {tuple(shape)} at the "
                "destination; needs one shape; check that both sides hold the same model"
            )
    if src.dtype != dst.dtype or src.dtype not in ITEM_BYTES:
        raise LayoutError(
            f"reshard: dtype {src.dtype} at the source, {dst.dtype} at the destination; needs one of "
            f"{', '.join(ITEM_BYTES)} on both; set the same dtype for the model and the engine"
        )


def check_holdings(layout: ModelLayout, side: str) -> None:
    """Raise LayoutError if a rank holds what the layout does not list, or a box that its tensor does not have."""
    seen: set[int] = set()
    kept = []
    for rank in layout.ranks:
        held = layout.holdings(rank)
        if id(held) in seen:
            continue
        seen.add(id(held))
        kept.append(held)  # an id stays taken while its tuple lives
        for one in held:
            where = f"reshard: {side} rank {rank}, parameter {one.param}"
            if one.tensor not in layout.tensors:
                raise LayoutError(f"{where}: holds {one.tensor}, which its layout does not list; add it to the tensors")
            whole = Box(tuple((0, extent) for extent in layout.tensors[one.tensor]))
            dims = {len(whole.spans), len(one.box.spans), len(one.param_start)}
            if len(dims) > 1 or not whole.contains(one.box) or one.box.num_elements < 1 or min(one.param_start) < 0:
                raise LayoutError(
                    f"{where}: box {one.box.spans} at {one.param_start} of {one.tensor} with shape "
                    f"{layout.tensors[one.tensor]}; needs a block inside it that is not empty; "
                    f"correct the {side} layout"
                )


def check_whole(index: HolderIndex, side: str) -> None:
    """Raise LayoutError unless the ranks of a layout together hold every element of every tensor."""
    for name, shape in index.layout.tensors.items():
        missing = [Box(tuple((0, extent) for extent in shape))]
        for box in index.boxes(name):
            missing = [left for part in missing for left in part.minus(box)]
            if not missing:
                break
        if missing:
            raise LayoutError(
                f"reshard: no {side} rank holds {name} at {missing[0].spans}; needs every element of shape {shape}; "
                f"correct the {side} layout"
            )
