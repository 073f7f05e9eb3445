"""Which weights one model can take over from another. Numbers and names only; no torch, no layout."""

from rlhf.config.checks import refuse
from rlhf.errors import LayoutError
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import Head, ModelSpec, Part


def inherited_tensors(
    src: ModelSpec, dst: ModelSpec, *, src_head: Head, dst_head: Head, where: str, source: str
) -> frozenset[str]:
    """Logical names of the weights that `dst` takes from `src`: all of it but its value head, if only it has one.

    A head that only `src` has is not taken.

    Args:
        src: The model that gives.
        dst: The model that takes.
        src_head: What stands on top of `src`.
        dst_head: The same of `dst`.
        where: The setting that asks for it, in a message.
        source: What `src` is called there.

    Raises:
        LayoutError: Another weight is missing in `src`, or left over there, or has another shape.
    """
    heads = {Part.LM_HEAD, Part.VALUE_HEAD}
    ours = {tensor.name: tensor for tensor in logical_tensors(dst, head=dst_head)}
    theirs = {tensor.name: tensor for tensor in logical_tensors(src, head=src_head)}
    cure = f"needs the same model for both; set model.path to the {source}'s, or model.init=checkpoint"
    for name, tensor in ours.items():
        if name not in theirs and tensor.part is not Part.VALUE_HEAD:
            refuse(f"{where}: the {source} has no {name}; {cure}", LayoutError)
        elif name in theirs and theirs[name].shape != tensor.shape:
            refuse(
                f"{where}: {name} has shape {tensor.shape}, {theirs[name].shape} in the {source}; {cure}", LayoutError
            )
    for name, tensor in theirs.items():
        if name not in ours and tensor.part not in heads:
            refuse(f"{where}: {name} of the {source} has no place in the model; {cure}", LayoutError)
    return frozenset(ours.keys() & theirs.keys())
