"""Checks of flat ragged tensors at the border of the algorithms."""

import torch
from torch import Tensor

from rlhf.errors import ShapeError


def check_lengths(where: str, lengths: Tensor) -> None:
    """Raise ShapeError unless lengths is int64 [B] on the CPU."""
    if lengths.dim() != 1 or lengths.dtype != torch.int64 or lengths.device.type != "cpu":
        raise ShapeError(
            f"{where}: lengths {tuple(lengths.shape)} {lengths.dtype} on {lengths.device}; needs int64 [B] on the CPU"
        )


def check_tokens(where: str, lengths: Tensor, **tokens: Tensor) -> None:
    """Raise ShapeError unless each named tensor has one entry for each token of the rows."""
    total = int(lengths.sum())
    for name, tensor in tokens.items():
        if tensor.shape != (total,):
            raise ShapeError(
                f"{where}: {name} {tuple(tensor.shape)}, but lengths sum to {total}; needs one entry for each token"
            )


def check_same(where: str, **tensors: Tensor) -> None:
    """Raise ShapeError unless all named tensors are 1-D and equally long, and those named *mask are bool."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ShapeError(f"{where}: {shapes}; needs one common [R]")
    for name, tensor in tensors.items():
        if name.endswith("mask") and tensor.dtype != torch.bool:
            raise ShapeError(f"{where}: {name} is {tensor.dtype}; needs bool, True on tokens that count")
