"""Which part of each parameter a rank owns among those that hold the same: of a trained one, what it updates.

Local: no communication, and nothing that a step left to gather is waited for; the own part is never stale.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatron.core.distributed import DistributedDataParallel
from torch.nn import Parameter

from rlhf.mcore.layout import EXPERTS, layers_before
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.param_names import local_name
from rlhf.reshard.layout import Box


def named_params(model: MegatronModel) -> dict[str, Parameter]:
    """This rank's parameters themselves by the names of `local_params`."""
    before = layers_before(model.spec, model.parallel, model.groups.pp_rank)
    return {
        local_name(name, start): param
        for module, start in zip(model.modules, before, strict=True)
        for name, param in module.named_parameters()
    }


def owned_boxes(model: MegatronModel) -> dict[str, tuple[Box, ...]]:
    """Boxes of each parameter that this rank owns; with those of the ranks that hold the same, every element once.

    Those are its dp peers, of an expert the ranks that differ in edp. Of a trained parameter the rank owns what its
    optimizer updates, a range of its elements laid end to end and so at most three boxes; of any other an even part of
    its rows.
    """
    params = named_params(model)
    trained = _trained_ranges(model)
    collection = model.groups.collection
    assert collection is not None, "members of the pool only"
    owned = {}
    for name, param in params.items():
        if param in trained:
            owned[name] = tuple(box for box, _ in boxes_of_range(param.shape, trained[param]))
            continue
        group = collection.expt_dp if EXPERTS in name else collection.dp
        rows, ranks, rank = len(param), group.size(), group.rank()
        first, end = rows * rank // ranks, rows * (rank + 1) // ranks
        rest = ((0, extent) for extent in param.shape[1:])
        owned[name] = (Box(((first, end), *rest)),) if first < end else ()
    return owned


def _trained_ranges(model: MegatronModel) -> Mapping[Parameter, range]:
    """Elements of each trained parameter that the optimizer updates here, in the parameter laid end to end.

    Megatron cuts each bucket of parameters evenly over dp, wherever the parameters begin.
    """
    found = {}
    for chunk in model.chunks:
        if not isinstance(chunk, DistributedDataParallel):
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for param, (start, end, bucket_number) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_number]
                size = bucket.grad_data.numel() // group.size()
                first = bucket.offset + group.rank() * size
                found[param] = range(max(start, first) - start, max(start, min(end, first + size)) - start)
    return found


def boxes_of_range(shape: Sequence[int], elements: range) -> Iterator[tuple[Box, int]]:
    """Boxes of a range of a tensor's elements laid end to end, and the number in the range of each one's first element.

    Of a vector one box; of a matrix the end of a row, whole rows, the start of a row, as far as there are any.
    """
    start, stop = elements.start, elements.stop
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box(((start, stop),)), 0
        return
    _, columns = shape
    at = start
    while at < stop:
        row, column = divmod(at, columns)
        rows = (stop - at) // columns if column == 0 else 0
        if rows:
            box = Box(((row, row + rows), (0, columns)))
        else:
            box = Box(((row, row + 1), (column, min(columns, column + stop - at))))
        yield box, at - start
        at += box.num_elements
