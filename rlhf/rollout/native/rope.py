"""Rotary position embedding: tables of cosines and sines, and their application."""

import torch
from torch import Tensor

from rlhf.families.rope import rotary_frequencies
from rlhf.families.spec import ModelSpec


def rotary_table(spec: ModelSpec, num_positions: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[num_positions, 2, 1, head_dim]: cosines, and sines with the sign of the first half turned round."""
    angles = torch.outer(torch.arange(num_positions).float(), rotary_frequencies(spec))
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    return torch.stack([cos, sin], 1).unsqueeze(2).to(device, dtype)


def rotate_(heads: Tensor, table: Tensor) -> None:
    """Turn heads [rows, heads, head_dim] in place by the table's rows [rows, 2, 1, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(table[:, 0]).addcmul_(swapped, table[:, 1])
