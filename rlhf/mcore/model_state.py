"""What a rank holds of a model and its optimizer, as blocks of stored tensors: to write its share, to read it all.

Blocks are views of the memory that training uses; nothing is copied, gathered or sent. Keys of a role PREFIX are
`PREFIX.KEY` for weights and `PREFIX.optimizer.state.exp_avg.KEY`, `exp_avg_sq` and, of bf16 weights, `fp32_param`
(Megatron's names, where the distributed optimizer is stored in the model's space), with KEY from stored.py.
"""

from collections.abc import Iterator

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhf.mcore.layout import EMBEDDING, OUTPUT
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.params import local_params
from rlhf.mcore.share import boxes_of_range, named_params, owned_boxes
from rlhf.mcore.stored import StoredPiece, held_of_stored, stored_shapes
from rlhf.reshard.block import Block
from rlhf.reshard.checksum import inside
from rlhf.reshard.layout import Box

OPTIMIZER = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


def model_blocks(model: MegatronModel, *, prefix: str = "", own_share: bool) -> list[Block]:
    """A rank's weights as blocks of stored tensors. Local; on the ranks of the pool.

    Args:
        model: On this rank.
        prefix: Of the keys, without its dot: the role's name.
        own_share: Over the pool each element once, on a rank where it is not stale: to write them. Else all that the
            rank holds, to read into; then call `weights_loaded`.
    """
    params, owned = local_params(model), owned_boxes(model) if own_share else {}
    shapes, pieces = stored_shapes(model.spec, head=model.head), _pieces_of(model, without_replicas=own_share)
    return [
        Block(_joined(prefix, piece.key), shapes[piece.key], *stored)
        for name, of_param in pieces.items()
        for box in (owned[name] if own_share else (_whole(params[name]),))
        for piece in of_param
        for stored in _inside(piece, box, params[name][box.slices])
    ]


def optimizer_blocks(model: MegatronModel, optimizer: Optimizer, *, prefix: str = "", own_share: bool) -> list[Block]:
    """A rank's moments, and masters of bf16 weights, as blocks of stored tensors. Local; on the ranks of the pool.

    A dp rank has those of its share of the weights and no others. Moments that no step has made yet are made here, as
    zeros. Frozen weights have none.

    Args:
        model: Of the optimizer, on this rank.
        optimizer: On this rank.
        prefix: As `model_blocks`'.
        own_share: Leave out what another rank of the pool holds too (norms on tensor-parallel peers, a tied head). Else
            all, to read into; then call `rlhf.mcore.state_record.restore_record`.
    """
    shapes, pieces = stored_shapes(model.spec, head=model.head), _pieces_of(model, without_replicas=own_share)
    return [
        Block(_joined(prefix, f"{OPTIMIZER}{kind}.{piece.key}"), shapes[piece.key], *stored)
        for name, shape, elements, shards in _shards(model, optimizer)
        for kind, shard in shards.items()
        for box, at in boxes_of_range(shape, elements)
        for piece in pieces.get(name, ())
        for stored in _inside(piece, box, shard[at : at + box.num_elements].view(box.shape))
    ]


@torch.no_grad()
def weights_loaded(model: MegatronModel, optimizer: Optimizer | None, *, with_masters: bool) -> None:
    """Finish reading into all blocks: clear the padding of the vocabulary, which no block has. Local.

    Args:
        model: All its blocks were read.
        optimizer: Its optimizer, if it was built already.
        with_masters: `optimizer_blocks` were read too. Else masters of bf16 weights start from the weights.
    """
    params = local_params(model)
    real_rows = _real_rows(model)
    for name, rows in real_rows.items():
        params[name][rows:].zero_()
    if optimizer is None:
        return
    if not with_masters:
        optimizer.weights_changed()
    for name, shape, elements, shards in _shards(model, optimizer):
        if name in real_rows:
            first = real_rows[name] * shape[1] - elements.start
            for shard in shards.values():
                shard[max(0, first) :].zero_()


def _real_rows(model: MegatronModel) -> dict[str, int]:
    """Rows of embedding and head on this rank that are no padding."""
    rows = {name: 0 for name in (EMBEDDING, OUTPUT) if name in local_params(model)}
    for name, pieces in _pieces_of(model, without_replicas=False).items():
        if name in rows:
            rows[name] = max(piece.box.spans[0][1] for piece in pieces)
    return rows


def _pieces_of(model: MegatronModel, *, without_replicas: bool) -> dict[str, list[StoredPiece]]:
    found: dict[str, list[StoredPiece]] = {}
    held = held_of_stored(
        model.spec, model.parallel, head=model.head, rank=model.groups.rank, without_replicas=without_replicas
    )
    for piece in held:
        found.setdefault(piece.tensor, []).append(piece)
    return found


def _inside(piece: StoredPiece, box: Box, data: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Place in the stored tensor, and elements, of what a piece has of a box of its parameter; `data` is the box."""
    common = piece.box.intersect(box)
    if common is not None:
        stored = piece.stored_box(common)
        yield stored, data[inside(box, common).slices][(None,) * len(piece.lead)]


_Shard = tuple[str, torch.Size, range, dict[str, Tensor]]
"""Parameter, its shape, a range of its elements, and for them each moment and the master."""


def _shards(model: MegatronModel, optimizer: Optimizer) -> Iterator[_Shard]:
    """What the optimizer updates on this rank."""
    names = {param: name for name, param in named_params(model).items()}
    for part in optimizer.megatron.chained_optimizers:
        assert isinstance(part, DistributedOptimizer), f"{type(part).__name__} keeps its state another way"
        if part.is_stub_optimizer:  # all that it could train is frozen
            continue
        for param in part.model_param_gbuf_map:
            group, place = part.model_param_group_index_map[param]
            main = part.optimizer.param_groups[group]["params"][place]
            span = part._get_model_param_range_map(param)["param"]
            assert main.numel() == span.size, f"{names[param]}: {main.numel()} elements for {span.size}"
            shards = {kind: moment.detach() for kind, moment in _moments(part.optimizer, main).items()}
            if param.dtype is not torch.float32:
                shards[MASTER] = main.detach()
            yield names[param], param.shape, range(span.start, span.end), shards


def _moments(adam: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Of one shard, by name; zeros before the first step, as that step would make them."""
    state = adam.state[param]
    if not state:
        state.update({kind: torch.zeros_like(param, requires_grad=False) for kind in MOMENTS})
        if isinstance(adam, torch.optim.AdamW):  # others count by group
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    return {kind: state[kind] for kind in MOMENTS}


def _whole(param: Tensor) -> Box:
    return Box(tuple((0, extent) for extent in param.shape))


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
