"""Setting a model's weights: from a Hugging Face folder, or drawn from a seed. Each rank touches only its slices."""

import hashlib
import logging
from collections.abc import Callable, Set
from pathlib import Path

import torch
from torch import Tensor

from rlhf.config.model import ModelConfig
from rlhf.errors import CheckpointError
from rlhf.families.files import HfFolder
from rlhf.families.folder import resolve_folder
from rlhf.families.registry import logical_tensors
from rlhf.families.spec import LogicalTensor, Part
from rlhf.mcore.layout import EMBEDDING, OUTPUT, megatron_layout
from rlhf.mcore.model import MegatronModel
from rlhf.mcore.params import local_params
from rlhf.reshard.layout import Box, ParamLayout

LOG = logging.getLogger(__name__)

_ONES = frozenset({Part.ATTN_NORM, Part.MLP_NORM, Part.FINAL_NORM, Part.Q_NORM, Part.K_NORM})
_ZEROS = frozenset({Part.Q_BIAS, Part.K_BIAS, Part.V_BIAS})

SliceOf = Callable[[LogicalTensor, Box], Tensor]

DRAW_ROWS = 256
"""Rows of a weight that one generator draws: a slice costs at most this many rows beyond its own."""


def set_weights(model: MegatronModel, config: ModelConfig) -> None:
    """Give a new model its weights as its config says. On all ranks of the pool; no communication.

    Raises:
        CheckpointError: See `load_weights`.
    """
    if config.init == "random":
        draw_weights(model)
    else:
        load_weights(model, resolve_folder(config.path))


def load_weights(model: MegatronModel, folder: Path) -> None:
    """Read this rank's slices of a checkpoint into its parameters. On all ranks of the pool; no communication.

    A value head that the checkpoint lacks is drawn from the model's seed, and the log says so. Peak memory above the
    parameters is the largest slice.

    Raises:
        CheckpointError: A tensor is missing or has another shape than config.json implies.
    """
    source = HfFolder(folder)
    names = source.names()
    tensors = logical_tensors(model.spec, head=model.head)
    source.check(tensor for tensor in tensors if tensor.name in names or not _may_be_drawn(tensor))
    take_weights(model, lambda tensor, box: source.read(tensor.name, box.slices), names=names, where=str(folder))


def take_weights(model: MegatronModel, slice_of: SliceOf, *, names: Set[str], where: str) -> None:
    """Set all weights from wherever `slice_of` finds a box of a tensor. On all ranks of the pool; no communication.

    Args:
        model: What is filled; rows of padding become zero.
        slice_of: Gives the elements of a tensor's box, in any dtype.
        names: The tensors that it has; a value head that is not among them is drawn from the model's seed, and the log
            says so.
        where: Their origin, in a message.

    Raises:
        CheckpointError: A parameter that no tensor sets.
    """
    drawn = {
        tensor.name
        for tensor in logical_tensors(model.spec, head=model.head)
        if _may_be_drawn(tensor) and tensor.name not in names
    }
    if drawn:
        LOG.info("%s: no %s; the value head starts from the seed", where, ", ".join(sorted(drawn)))
    _fill(
        model,
        lambda tensor, box: _draw(model, tensor, box) if tensor.name in drawn else slice_of(tensor, box),
        where=where,
    )


def _may_be_drawn(tensor: LogicalTensor) -> bool:
    return tensor.part is Part.VALUE_HEAD


def draw_rest(model: MegatronModel, *, given: Set[str]) -> None:
    """Draw the weights that nothing else gives, and clear rows of padding; the `given` ones stay as they are.

    On all ranks of the pool; no communication.
    """
    _fill(model, lambda tensor, box: _draw(model, tensor, box), where="random init", given=given)


def draw_weights(model: MegatronModel) -> None:
    """Random weights, the same in every layout of the same seed. On all ranks of the pool; no communication.

    Norms start at one, biases at zero, the rest from a normal distribution: of standard deviation 1 / (H + 1) for the
    value head, so that first values are near 0 (Stiennon et al. 2020, arXiv:2009.01325), of the spec's `init_std` else.
    """
    _fill(model, lambda tensor, box: _draw(model, tensor, box), where="random init")


def _fill(model: MegatronModel, slice_of: SliceOf, *, where: str, given: Set[str] = frozenset()) -> None:
    tensors = {tensor.name: tensor for tensor in logical_tensors(model.spec, head=model.head)}
    layout = megatron_layout(model.spec, model.parallel, head=model.head, dtype="float32")
    params, holdings = local_params(model), layout.holdings(model.groups.rank)
    unset = set(params) - {piece.param for piece in holdings}
    if unset:
        raise CheckpointError(f"{where}: nothing sets {', '.join(sorted(unset))}; needs a layout that knows them")
    for name in (EMBEDDING, OUTPUT):  # rows of padding, which no piece covers
        if name in params:
            ends = [piece.param_box(piece.box).spans[0][1] for piece in holdings if piece.param == name]
            params[name][max(ends, default=0) :].zero_()
    for piece in holdings:
        if piece.tensor in given:
            continue
        target = _target(params, piece)
        target.copy_(slice_of(tensors[piece.tensor], piece.box))


def _target(params: dict[str, Tensor], piece: ParamLayout) -> Tensor:
    return params[piece.param][piece.param_box(piece.box).slices]


def _draw(model: MegatronModel, tensor: LogicalTensor, box: Box) -> Tensor:
    """One box of a random weight: a function of (seed, name, indices) only, drawn in bands of rows."""
    if tensor.part in _ONES:
        return torch.ones(box.shape)
    if tensor.part in _ZEROS:
        return torch.zeros(box.shape)
    std = 1 / (model.spec.hidden_size + 1) if tensor.part is Part.VALUE_HEAD else model.spec.init_std
    (start, stop), columns = box.spans[0], box.slices[1:]
    out = torch.empty(box.shape)
    for band in range(start // DRAW_ROWS, -(-stop // DRAW_ROWS)):
        first, last = band * DRAW_ROWS, min((band + 1) * DRAW_ROWS, tensor.shape[0])
        generator = torch.Generator().manual_seed(_seed(model.seed, tensor.name, band))
        rows = torch.randn(last - first, *tensor.shape[1:], generator=generator).mul_(std)
        low, high = max(start, first), min(stop, last)
        out[low - start : high - start] = rows[(slice(low - first, high - first), *columns)]
    return out


def _seed(seed: int, name: str, band: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{band}".encode()).digest()[:7], "big")
